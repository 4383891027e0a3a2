/* Read programs: trees that say where a file's bytes come from. native/program.py builds them, program.c runs them. */
#ifndef CKPTFS_PROGRAM_H
#define CKPTFS_PROGRAM_H

#include "native.h"

enum { KIND_LITERAL, KIND_FILE, KIND_CHUNKS, KIND_SLICE, KIND_GATHER_ROWS, KIND_CONCAT, KIND_TRANSPOSE };
enum { SCRATCH = 1 << 18 };

/* One structure for all kinds, the twin of program.Program. Offsets and sizes are in bytes unless they name rows. */
typedef struct program {
    int64_t kind;
    int64_t fd;                     /* FILE, CHUNKS */
    const byte *literal;            /* LITERAL */
    const int64_t *starts;          /* CHUNKS: where each chunk's elements begin;  CONCAT: each source, and the end */
    const int64_t *offsets;         /* CHUNKS: where each chunk begins;  GATHER_ROWS: first source row of each block */
    byte *states;                   /* CHUNKS: UNKNOWN, UNCOMPRESSED, … of each chunk */
    const int64_t *order;           /* GATHER_ROWS: the source row of each row */
    const struct program *source;   /* SLICE, GATHER_ROWS, TRANSPOSE */
    const struct program **sources; /* CONCAT: NULL for a source that Python reads */
    int64_t offset;                 /* FILE: position in the file;  SLICE: in the source */
    int64_t n_sources;              /* CONCAT */
    int64_t grid_rows, grid_cols;   /* CHUNKS: chunks one below the other, and side by side */
    int64_t chunk_rows;             /* CHUNKS: rows of a chunk */
    int64_t chunk_row_nbytes;       /* CHUNKS: one row of a chunk */
    int64_t chunk_nbytes;           /* CHUNKS: one decoded chunk */
    int64_t row_nbytes;             /* CHUNKS, GATHER_ROWS, TRANSPOSE: one row of the matrix */
    int64_t block_rows;             /* GATHER_ROWS: rows of a block */
    int64_t n_rows;                 /* TRANSPOSE: rows of the transpose */
    int64_t tile_rows;              /* TRANSPOSE: rows of a tile */
    int64_t itemsize;               /* TRANSPOSE: one element */
    int64_t source_row_nbytes;      /* TRANSPOSE: one row of the source */
    int64_t serial;                 /* CHUNKS, TRANSPOSE: identifies the tensor in this process */
    int64_t prefetch_nbytes;        /* FILE, CHUNKS: largest prefetch request that the kernel does not cut */
} program;

/* One read request: SCRATCH + LINE bytes of memory for its use, and its size. */
typedef struct {
    byte *scratch;
    int64_t nbytes;
} request;

/* Whether `count` chunks from `first` on, each `step`-th, are uncompressed; classifies those that are UNKNOWN. */
int ckptfs_all_uncompressed(const program *p, int64_t first, int64_t count, int64_t step);
/* 1 when bytes [start, start + nbytes) of a TRANSPOSE are in `out`, 0 when Python has to read them. */
int ckptfs_fill_transposed(const program *p, int64_t start, int64_t nbytes, byte *out, const request *r);

/* Called before bytes are read;  what they return goes to ckptfs_prefetch_done afterwards. See prefetch.c. */
int64_t ckptfs_prefetch_rows(const program *p, int64_t start, int64_t nbytes);
int64_t ckptfs_prefetch_columns(const program *p, int64_t first, int64_t count);
int64_t ckptfs_prefetch_bytes(const program *p, int64_t start, int64_t nbytes);
void ckptfs_prefetch_done(int64_t waits_before);

static inline const program *source_of(const program *p, int64_t i)
{
    return __atomic_load_n(&p->sources[i], __ATOMIC_ACQUIRE);
}

#endif
