/* Answers the kernel's read requests without Python, from the read programs that mount/open_file.py builds.
 *
 * A program stands for a range of bytes: a literal, a part of a file, a tensor in uncompressed chunks, or programs that
 * are sliced, reordered, transposed or joined. Python reads whatever needs more (decoding, arithmetic, messages about
 * damage), and gives the same bytes for the same request.
 */
#define _GNU_SOURCE /* O_DIRECT */
#include "program.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

enum { MAX_GATHERED = 8 << 20, MIN_ALIGNED = 64 << 10, PAGE = 4096 };

static int fill(const program *p, int64_t start, int64_t nbytes, byte *out, const request *r);

int ckptfs_all_uncompressed(const program *p, int64_t first, int64_t count, int64_t step)
{
    const byte *states = p->states + first;
    for (int pass = 0;; pass++) {
        int is_known = 1;
        for (int64_t i = 0; i < count; i++) {
            if (states[i * step] != UNCOMPRESSED && states[i * step] != UNKNOWN)
                return 0;
            is_known &= states[i * step] == UNCOMPRESSED;
        }
        if (is_known || pass)
            return is_known;
        if (ckptfs_classify_chunks((int)p->fd, p->offsets + first, (count - 1) * step + 1, step, p->chunk_nbytes,
                                   p->states + first))
            return 0;
    }
}

static int fill_file(const program *p, int64_t start, int64_t nbytes, byte *out)
{
    int64_t waits = ckptfs_prefetch_bytes(p, start, nbytes);
    int64_t failed = ckptfs_read_exactly((int)p->fd, out, nbytes, p->offset + start);
    ckptfs_prefetch_done(waits);
    return !failed;
}

static int fill_chunks(const program *p, int64_t start, int64_t nbytes, byte *out, const request *r)
{
    int64_t row = start / p->row_nbytes, last_row = (start + nbytes - 1) / p->row_nbytes;
    int64_t first = row / p->chunk_rows * p->grid_cols, stop = (last_row / p->chunk_rows + 1) * p->grid_cols;
    if (row == last_row) { /* a part of one row lies in few of its chunks */
        stop = first + (start + nbytes - 1) % p->row_nbytes / p->chunk_row_nbytes + 1;
        first += start % p->row_nbytes / p->chunk_row_nbytes;
    }
    int64_t waits = ckptfs_prefetch_rows(p, start, nbytes);
    int done = ckptfs_all_uncompressed(p, first, stop - first, 1) &&
               !ckptfs_gather_range((int)p->fd, p->starts, p->grid_cols, p->chunk_rows, p->chunk_row_nbytes,
                                    p->row_nbytes, start, nbytes, out, r->scratch, SCRATCH);
    ckptfs_prefetch_done(waits);
    return done;
}

/* Rows [row, row + rows) of a GATHER_ROWS, which come from neighbouring source rows. */
static int fill_rows(const program *p, int64_t row, int64_t rows, byte *out, const request *r)
{
    const int64_t *order = p->order + row;
    int64_t low = order[0], high = order[0], run = 1;
    while (run < rows && order[run] == order[0] + run)
        run++;
    if (run == rows)
        return fill(p->source, order[0] * p->row_nbytes, rows * p->row_nbytes, out, r);
    for (int64_t i = 1; i < rows; i++) {
        low = order[i] < low ? order[i] : low;
        high = order[i] > high ? order[i] : high;
    }
    int64_t source_nbytes = (high - low + 1) * p->row_nbytes;
    if (source_nbytes > MAX_GATHERED)
        return 0;
    byte *found = malloc((size_t)source_nbytes);
    int done = found && fill(p->source, low * p->row_nbytes, source_nbytes, found, r);
    for (int64_t i = 0; done && i < rows; i++)
        memcpy(out + i * p->row_nbytes, found + (order[i] - low) * p->row_nbytes, (size_t)p->row_nbytes);
    free(found);
    return done;
}

/* Rows move in blocks of neighbouring rows; blocks that are neighbours in the source, too, are read together. */
static int fill_gathered(const program *p, int64_t start, int64_t nbytes, byte *out, const request *r)
{
    while (nbytes > 0) {
        int64_t row = start / p->row_nbytes, in_row = start % p->row_nbytes, n = p->row_nbytes - in_row;
        if (in_row || nbytes < n) { /* a part of a row */
            n = min_of(nbytes, n);
            if (!fill(p->source, p->order[row] * p->row_nbytes + in_row, n, out, r))
                return 0;
        } else {
            int64_t rows = nbytes / p->row_nbytes, block = row / p->block_rows, size = p->block_rows;
            while ((block + 1) * size < row + rows && p->offsets[block + 1] == p->offsets[block] + size)
                block++;
            rows = min_of((block + 1) * size - row, rows);
            n = rows * p->row_nbytes;
            if (!fill_rows(p, row, rows, out, r))
                return 0;
        }
        start += n;
        nbytes -= n;
        out += n;
    }
    return 1;
}

/* The last source of a CONCAT that starts at or before a position. */
static int64_t source_at(const program *p, int64_t position)
{
    int64_t low = 0, high = p->n_sources;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (p->starts[middle] <= position)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* How many of the bytes from `start` on are in `out` now: all, or those before a source that Python reads. */
static int64_t fill_concat(const program *p, int64_t start, int64_t nbytes, byte *out, const request *r)
{
    int64_t done = 0;
    for (int64_t i = source_at(p, start); done < nbytes && i < p->n_sources; i++) {
        int64_t offset = start + done - p->starts[i], n = p->starts[i + 1] - p->starts[i] - offset;
        n = min_of(n, nbytes - done);
        if (n <= 0)
            continue;
        const program *source = source_of(p, i);
        if (!source || !fill(source, offset, n, out + done, r))
            break;
        done += n;
    }
    return done;
}

/* Whether all sources of these bytes have programs. */
static int has_sources(const program *p, int64_t start, int64_t nbytes)
{
    for (int64_t i = source_at(p, start); i < p->n_sources && p->starts[i] < start + nbytes; i++)
        if (p->starts[i] < p->starts[i + 1] && !source_of(p, i))
            return 0;
    return 1;
}

/* 1 when all of it is in `out`, 0 when Python has to read it. */
static int fill(const program *p, int64_t start, int64_t nbytes, byte *out, const request *r)
{
    switch (p->kind) {
    case KIND_LITERAL:
        memcpy(out, p->literal + start, (size_t)nbytes);
        return 1;
    case KIND_FILE:
        return fill_file(p, start, nbytes, out);
    case KIND_CHUNKS:
        return fill_chunks(p, start, nbytes, out, r);
    case KIND_SLICE:
        return fill(p->source, p->offset + start, nbytes, out, r);
    case KIND_GATHER_ROWS:
        return fill_gathered(p, start, nbytes, out, r);
    case KIND_CONCAT:
        return fill_concat(p, start, nbytes, out, r) == nbytes;
    case KIND_TRANSPOSE:
        return ckptfs_fill_transposed(p, start, nbytes, out, r);
    }
    return 0;
}

/* Read a CONCAT from `start` on: how many of nbytes are in `out` now. Python reads the next one. */
int64_t ckptfs_read(const program *file, int64_t start, int64_t nbytes, byte *out)
{
    request r = {malloc(SCRATCH + LINE), nbytes}; /* freed a moment ago, so still in the cache */
    int64_t done = r.scratch ? fill_concat(file, start, nbytes, out, &r) : 0;
    free(r.scratch);
    return done;
}

/* Set the i-th source of a CONCAT, which other threads may be reading. */
void ckptfs_set_source(program *p, int64_t i, const program *source)
{
    __atomic_store_n(&p->sources[i], source, __ATOMIC_RELEASE);
}

typedef int (*fuse_read)(const char *, char *, size_t, off_t, void *);
static fuse_read read_in_python;
static size_t handle_offset, flags_offset;

/* Set the callback that answers the rest, and where handle and open flags are in libfuse's `struct fuse_file_info`. */
void ckptfs_set_fallback(fuse_read python, int64_t handle, int64_t flags)
{
    read_in_python = python;
    handle_offset = (size_t)handle;
    flags_offset = (size_t)flags;
}

/* The handle is the address of the open file's CONCAT, or an odd number for files that Python reads. */
static int answer(const char *path, char *out, size_t size, off_t offset, void *info)
{
    uint64_t handle;
    memcpy(&handle, (const byte *)info + handle_offset, sizeof handle);
    if (handle & 1)
        return read_in_python(path, out, size, offset, info);
    const program *file = (const program *)(uintptr_t)handle;
    int64_t nbytes = min_of(file->starts[file->n_sources] - (int64_t)offset, (int64_t)size);
    if (nbytes <= 0)
        return 0; /* with direct I/O the kernel does not clamp, and readers would loop */
    if (has_sources(file, (int64_t)offset, nbytes) && ckptfs_read(file, (int64_t)offset, nbytes, (byte *)out) == nbytes)
        return (int)nbytes;
    return read_in_python(path, out, size, offset, info);
}

/* libfuse's callback `read`. */
int ckptfs_fuse_read(const char *path, char *out, size_t size, off_t offset, void *info)
{
    int32_t flags;
    memcpy(&flags, (const byte *)info + flags_offset, sizeof flags);
    int done = answer(path, out, size, offset, info);
    ckptfs_count_answer();
    if (flags & O_DIRECT)
        ckptfs_wake_spare_threads(); /* a reader waits for each of its requests, and its processor is free meanwhile */
    return done;
}

/* libfuse's `struct fuse_bufvec` of one buffer in memory, with space for fields of later versions. */
typedef struct {
    size_t count, idx, off, size;
    int flags;
    void *mem;
    int fd;
    off_t pos;
    byte more[64];
} reply;

/* libfuse's callback `read_buf`, which allocates the memory of its reply; libfuse frees it.
 *
 * Large replies begin at a page, as what they are copied into does: otherwise the kernel looks up each page twice.
 */
int ckptfs_fuse_read_buf(const char *path, reply **out, size_t size, off_t offset, void *info)
{
    reply *made = calloc(1, sizeof *made);
    if (!made)
        return -ENOMEM;
    if (size < MIN_ALIGNED)
        made->mem = malloc(size);
    else if (posix_memalign(&made->mem, PAGE, size))
        made->mem = NULL;
    int done = made->mem ? ckptfs_fuse_read(path, made->mem, size, offset, info) : -ENOMEM;
    if (done < 0) {
        free(made->mem);
        free(made);
        return done;
    }
    made->count = 1;
    made->size = (size_t)done;
    made->fd = -1;
    *out = made;
    return 0;
}
