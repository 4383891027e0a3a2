/* What the C files share. Every exported function begins with ckptfs_; native/library.py says what it is given. */
#ifndef CKPTFS_NATIVE_H
#define CKPTFS_NATIVE_H

#define _FILE_OFFSET_BITS 64
#include <stdint.h>

typedef uint8_t byte;

enum { LINE = 64 }; /* bytes of a line of the processor's caches */
enum { UNKNOWN, PLAIN, ENCODED, MISSING }; /* what is known of a chunk, as in formats/hdf5/chunks_uncompressed.py */

/* 0, or 1 + the offset where the file ends, or -errno. */
int64_t ckptfs_read_exactly(int fd, byte *out, int64_t n, int64_t offset);
int64_t ckptfs_gather_span(int fd, const int64_t *starts, int64_t count, int64_t high, int64_t wide, int64_t cols,
                           int64_t start, int64_t nbytes, byte *out, byte *scratch, int64_t scratch_nbytes);
int64_t ckptfs_gather_transposed(int fd, const int64_t *starts, int64_t step, int64_t count, int64_t high, int64_t wide,
                                 int64_t size, int64_t row, int64_t rows, int64_t col, int64_t cols, byte *out,
                                 int64_t pitch, byte *scratch, int64_t scratch_nbytes);
int64_t ckptfs_look(int fd, const int64_t *offsets, int64_t n, int64_t step, int64_t nbytes, byte *states);

/* For spare_threads.c: this thread has answered a read of the kernel;  several threads answer such reads sooner than one. */
void ckptfs_answered(void);
void ckptfs_invite_help(void);

static inline uint64_t big_endian(const byte *in, int n)
{
    uint64_t value = 0;
    for (int i = 0; i < n; i++)
        value = value << 8 | in[i];
    return value;
}

#endif
