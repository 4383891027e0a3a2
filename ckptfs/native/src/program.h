/* Nodes, which stand for runs of bytes: what program.c and transpose.c share. native/program.py makes them. */
#ifndef CKPTFS_NODES_H
#define CKPTFS_NODES_H

#include "native.h"

enum { TEXT, STORED, TILES, PART, ORDER, JOIN, TURN };
enum { SCRATCH = 1 << 18 };

/* One structure for all kinds, the twin of program.Node. All sizes and positions in bytes, but for rows and chunks. */
typedef struct node {
    int64_t kind, fd;
    const byte *text;            /* TEXT */
    const int64_t *starts;       /* TILES: where each chunk's elements begin;  JOIN: of each part, and the end */
    const int64_t *offsets;      /* TILES: where each chunk begins;  ORDER: the first row in `part` of each block */
    byte *states;                /* TILES */
    const int64_t *order;        /* ORDER: which row of `part` stands in each row */
    const struct node *part;     /* PART, ORDER;  TURN: the matrix that is transposed, TILES or rows of them joined */
    const struct node **parts;   /* JOIN: NULL for those that are left to Python */
    int64_t shift;               /* STORED: position in the file;  PART: in `part`;  TURN: names the tensor;
                                    TILES: rows of chunks */
    int64_t n;                   /* TILES: chunks in a row of them;  JOIN: parts;  ORDER: a block's rows;  TURN: rows */
    int64_t high, wide;          /* TILES: a chunk's rows, and its row;  TURN: rows of a tile, and an element */
    int64_t cols;                /* TILES, ORDER, TURN: the matrix's row */
    int64_t nbytes;              /* TILES: of a chunk;  TURN: of a row of `part` */
    int64_t step;                /* TILES, STORED: most bytes of one hint to the kernel */
    int64_t name;                /* TILES: of the matrix, among all */
} node;

/* What a request brings along: SCRATCH + LINE bytes of memory, and how many bytes it is about. */
typedef struct {
    byte *scratch;
    int64_t asked;
} request;

/* Whether `count` chunks from `first` on, each `step`-th, are plain; looks at those not looked at before. */
int ckptfs_all_plain(const node *of, int64_t first, int64_t count, int64_t step);
/* 1 when bytes [start, start + nbytes) of a TURN are in `out`. */
int ckptfs_fill_turned(const node *of, int64_t start, int64_t nbytes, byte *out, const request *asked);

/* A hint before bytes are read, and ckptfs_waited with what it returned behind that: see prefetch.c. */
int64_t ckptfs_ahead_rows(const node *of, int64_t start, int64_t nbytes);
int64_t ckptfs_ahead_columns(const node *of, int64_t first, int64_t count);
int64_t ckptfs_ahead_bytes(const node *of, int64_t start, int64_t nbytes);
void ckptfs_waited(int64_t before);

static inline const node *part_of(const node *of, int64_t i)
{
    return __atomic_load_n(&of->parts[i], __ATOMIC_ACQUIRE);
}

#endif
