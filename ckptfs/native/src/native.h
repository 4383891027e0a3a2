/* Declarations that the C files share. Exported functions begin with ckptfs_; native/library.py documents arguments. */
#ifndef CKPTFS_NATIVE_H
#define CKPTFS_NATIVE_H

#define _FILE_OFFSET_BITS 64
#include <stdint.h>

typedef uint8_t byte;

enum { LINE = 64 }; /* bytes of a cache line */
enum { UNKNOWN, UNCOMPRESSED, ENCODED, MISSING }; /* states of a chunk, as in formats/hdf5/chunk_table.py */

/* Return 0, or 1 + the offset where the file ends, or -errno. */
int64_t ckptfs_read_exactly(int fd, byte *out, int64_t n, int64_t offset);
int64_t ckptfs_gather_range(int fd, const int64_t *starts, int64_t grid_cols, int64_t chunk_rows,
                            int64_t chunk_row_nbytes, int64_t row_nbytes, int64_t start, int64_t nbytes, byte *out,
                            byte *scratch, int64_t scratch_nbytes);
int64_t ckptfs_gather_transposed(int fd, const int64_t *starts, int64_t step, int64_t count, int64_t chunk_rows,
                                 int64_t chunk_row_nbytes, int64_t itemsize, int64_t row, int64_t rows, int64_t col,
                                 int64_t cols, byte *out, int64_t pitch, byte *scratch, int64_t scratch_nbytes);
int64_t ckptfs_classify_chunks(int fd, const int64_t *offsets, int64_t n, int64_t step, int64_t nbytes, byte *states);

/* spare_threads.c: this thread has answered a read;  several threads would answer such reads sooner than one. */
void ckptfs_count_answer(void);
void ckptfs_wake_spare_threads(void);

static inline int64_t min_of(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline uint64_t big_endian(const byte *in, int n)
{
    uint64_t value = 0;
    for (int i = 0; i < n; i++)
        value = value << 8 | in[i];
    return value;
}

#endif
