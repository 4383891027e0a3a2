/* Decodes many LZ4 chunks in one call. The decoder itself is the lz4 package's; Python passes its address.
 *
 * The Python twin is formats/hdf5/filters.py, which also says what is wrong with a damaged chunk.
 */
#include "native.h"

#include <string.h>

/* LZ4_decompress_safe: the size of what is in `out` now, or a negative number. */
typedef int (*lz4_decoder)(const char *in, char *out, int in_nbytes, int out_nbytes);

/* 1 when `out` has the nbytes of a stored chunk: u64 total, u32 block size, then u32 size and data of each block. */
static int decode(lz4_decoder lz4, const byte *in, int64_t stored, byte *out, int64_t nbytes)
{
    if (stored < 12 || big_endian(in, 8) != (uint64_t)nbytes)
        return 0;
    int64_t block = (int64_t)big_endian(in + 8, 4), at = 12;
    if (block == 0)
        return 0;
    for (int64_t done = 0; done < nbytes; done += block) {
        int64_t n = min_of(nbytes - done, block);
        if (stored - at < 4)
            return 0;
        int64_t size = (int64_t)big_endian(in + at, 4);
        at += 4;
        if (size > stored - at)
            return 0;
        if (size == n) /* an uncompressed block */
            memcpy(out + done, in + at, (size_t)n);
        else if (lz4((const char *)in + at, (char *)out + done, (int)size, (int)n) != (int)n)
            return 0;
        at += size;
    }
    return 1;
}

/* Fill `out` with a rectangle of a matrix whose chunks are uncompressed or LZ4: `n_down` times `n_across` chunks.
 *
 * starts, offsets, stored, states: of the first chunk, as in chunk_table.ChunkPlan;  grid_cols: from a chunk to the one
 *   below it
 * chunk_rows, chunk_row_nbytes: rows of a chunk, and bytes of its row
 * rows, row_nbytes: the rectangle's, which may cut the last chunks;  pitch: distance of rows in `out`
 * scratch: space for a decoded chunk, and behind it for a stored one
 * Returns how many grid rows are done: all, or those before one that C cannot decode.
 */
int64_t ckptfs_decompress(lz4_decoder lz4, int fd, const int64_t *starts, const int64_t *offsets, const int64_t *stored,
                          const byte *states, int64_t grid_cols, int64_t n_down, int64_t n_across, int64_t chunk_rows,
                          int64_t chunk_row_nbytes, int64_t rows, int64_t row_nbytes, byte *out, int64_t pitch,
                          byte *scratch, int64_t scratch_nbytes)
{
    const int64_t nbytes = chunk_rows * chunk_row_nbytes, max_stored = scratch_nbytes - nbytes;
    for (int64_t i = 0; i < n_down; i++)
        for (int64_t j = 0; j < n_across; j++) {
            int64_t k = i * grid_cols + j, left = j * chunk_row_nbytes;
            int64_t height = min_of(rows - i * chunk_rows, chunk_rows);
            int64_t width = min_of(row_nbytes - left, chunk_row_nbytes);
            byte *to = out + i * chunk_rows * pitch + left;
            int in_place = height == chunk_rows && width == chunk_row_nbytes && pitch == chunk_row_nbytes;
            byte *chunk = in_place ? to : scratch;
            if (states[k] == UNCOMPRESSED) {
                if (ckptfs_read_exactly(fd, chunk, height * chunk_row_nbytes, starts[k]))
                    return i;
            } else {
                byte *compressed = scratch + nbytes;
                if (states[k] == MISSING || stored[k] > max_stored ||
                    ckptfs_read_exactly(fd, compressed, stored[k], offsets[k]) ||
                    !decode(lz4, compressed, stored[k], chunk, nbytes))
                    return i;
            }
            for (int64_t r = 0; r < height && !in_place; r++)
                memcpy(to + r * pitch, chunk + r * chunk_row_nbytes, (size_t)width);
        }
    return n_down;
}
