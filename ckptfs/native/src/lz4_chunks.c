/* Chunks that LZ4 made smaller, many in one call. The decoder itself is the lz4 package's, which is handed over.
 *
 * The twin in Python is formats/h5_filters.py, which also says what is wrong with a damaged chunk.
 */
#include "native.h"

#include <string.h>

/* LZ4_decompress_safe: the size of what is in `out` now, or a negative number. */
typedef int (*decompress)(const char *in, char *out, int in_nbytes, int out_nbytes);

/* 1 when `out` has the nbytes of a stored chunk: u64 total, u32 block size, then u32 size and data of each block. */
static int decode(decompress lz4, const byte *in, int64_t stored, byte *out, int64_t nbytes)
{
    if (stored < 12 || big_endian(in, 8) != (uint64_t)nbytes)
        return 0;
    int64_t block = (int64_t)big_endian(in + 8, 4), at = 12;
    if (block == 0)
        return 0;
    for (int64_t done = 0; done < nbytes; done += block) {
        int64_t n = nbytes - done < block ? nbytes - done : block;
        if (stored - at < 4)
            return 0;
        int64_t size = (int64_t)big_endian(in + at, 4);
        at += 4;
        if (size > stored - at)
            return 0;
        if (size == n) /* plain */
            memcpy(out + done, in + at, (size_t)n);
        else if (lz4((const char *)in + at, (char *)out + done, (int)size, (int)n) != (int)n)
            return 0;
        at += size;
    }
    return 1;
}

/* A rectangle of a matrix in chunks that are plain or packed: `bands` rows of `count` chunks, into `out`.
 *
 * starts, offsets, stored, states: of the first chunk, as in h5_plain.Plan; the chunk below is `grid` places behind
 * high, wide: a chunk's rows, and bytes of its row;  rows, cols: of the rectangle, in rows and bytes, cut at its edges
 * pitch: distance of rows in `out`;  scratch: room for a decoded chunk, and behind it for a stored one
 * Returns how many rows of chunks are there: all, or those before one that takes more than this.
 */
int64_t ckptfs_unpack(decompress lz4, int fd, const int64_t *starts, const int64_t *offsets, const int64_t *stored,
                      const byte *states, int64_t grid, int64_t bands, int64_t count, int64_t high, int64_t wide,
                      int64_t rows, int64_t cols, byte *out, int64_t pitch, byte *scratch, int64_t scratch_nbytes)
{
    const int64_t nbytes = high * wide, room = scratch_nbytes - nbytes;
    for (int64_t i = 0; i < bands; i++)
        for (int64_t j = 0; j < count; j++) {
            int64_t k = i * grid + j, height = rows - i * high < high ? rows - i * high : high;
            int64_t width = cols - j * wide < wide ? cols - j * wide : wide;
            byte *to = out + i * high * pitch + j * wide;
            int whole = height == high && width == wide && pitch == wide;
            byte *chunk = whole ? to : scratch;
            if (states[k] == PLAIN) {
                if (ckptfs_read_exactly(fd, chunk, height * wide, starts[k]))
                    return i;
            } else {
                byte *packed = scratch + nbytes;
                if (states[k] == MISSING || stored[k] > room ||
                    ckptfs_read_exactly(fd, packed, stored[k], offsets[k]) ||
                    !decode(lz4, packed, stored[k], chunk, nbytes))
                    return i;
            }
            for (int64_t r = 0; r < height && !whole; r++)
                memcpy(to + r * pitch, chunk + r * wide, (size_t)width);
        }
    return bands;
}
