/* Requests of the kernel answered without Python: a file's bytes from a tree of nodes that `mount/open_file.py` makes.
 *
 * A node stands for a run of bytes: text, a part of a file, a tensor in plain chunks, or others joined, cut and put in
 * order. Whatever needs more (decoding, arithmetic, words about damage) is left to Python, which gives the same bytes
 * for the same request.
 */
#define _GNU_SOURCE /* O_DIRECT */
#include "program.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

enum { MOST_ORDERED = 8 << 20, LEAST_ALIGNED = 64 << 10, PAGE = 4096 };

static int fill(const node *of, int64_t start, int64_t nbytes, byte *out, const request *asked);

int ckptfs_all_plain(const node *of, int64_t first, int64_t count, int64_t step)
{
    const byte *states = of->states + first;
    for (int pass = 0;; pass++) {
        int known = 1;
        for (int64_t i = 0; i < count; i++) {
            if (states[i * step] != PLAIN && states[i * step] != UNKNOWN)
                return 0;
            known &= states[i * step] == PLAIN;
        }
        if (known || pass)
            return known;
        if (ckptfs_look((int)of->fd, of->offsets + first, (count - 1) * step + 1, step, of->nbytes, of->states + first))
            return 0;
    }
}

static int fill_stored(const node *of, int64_t start, int64_t nbytes, byte *out)
{
    int64_t waits = ckptfs_ahead_bytes(of, start, nbytes);
    int64_t failed = ckptfs_read_exactly((int)of->fd, out, nbytes, of->shift + start);
    ckptfs_waited(waits);
    return !failed;
}

static int fill_tiles(const node *of, int64_t start, int64_t nbytes, byte *out, const request *asked)
{
    int64_t row = start / of->cols, last = (start + nbytes - 1) / of->cols;
    int64_t first = row / of->high * of->n, end = (last / of->high + 1) * of->n;
    if (row == last) { /* a part of one row lies in few of its chunks */
        end = first + (start + nbytes - 1) % of->cols / of->wide + 1;
        first += start % of->cols / of->wide;
    }
    int64_t waits = ckptfs_ahead_rows(of, start, nbytes);
    int done = ckptfs_all_plain(of, first, end - first, 1) &&
               !ckptfs_gather_span((int)of->fd, of->starts, of->n, of->high, of->wide, of->cols, start, nbytes, out,
                                   asked->scratch, SCRATCH);
    ckptfs_waited(waits);
    return done;
}

static int fill_rows(const node *of, int64_t row, int64_t rows, byte *out, const request *asked)
{
    const int64_t *order = of->order + row;
    int64_t low = order[0], high = order[0], run = 1;
    while (run < rows && order[run] == order[0] + run)
        run++;
    if (run == rows)
        return fill(of->part, order[0] * of->cols, rows * of->cols, out, asked);
    for (int64_t i = 1; i < rows; i++) {
        low = order[i] < low ? order[i] : low;
        high = order[i] > high ? order[i] : high;
    }
    if ((high - low + 1) * of->cols > MOST_ORDERED)
        return 0;
    byte *found = malloc((size_t)((high - low + 1) * of->cols));
    int done = found && fill(of->part, low * of->cols, (high - low + 1) * of->cols, found, asked);
    for (int64_t i = 0; done && i < rows; i++)
        memcpy(out + i * of->cols, found + (order[i] - low) * of->cols, (size_t)of->cols);
    free(found);
    return done;
}

/* Rows in blocks that each come from neighbouring rows; blocks that neighbour each other there, too, go together. */
static int fill_ordered(const node *of, int64_t start, int64_t nbytes, byte *out, const request *asked)
{
    while (nbytes > 0) {
        int64_t row = start / of->cols, inside = start % of->cols, n = of->cols - inside;
        if (inside || nbytes < n) { /* a part of a row */
            n = nbytes < n ? nbytes : n;
            if (!fill(of->part, of->order[row] * of->cols + inside, n, out, asked))
                return 0;
        } else {
            int64_t rows = nbytes / of->cols, block = row / of->n;
            while ((block + 1) * of->n < row + rows && of->offsets[block + 1] == of->offsets[block] + of->n)
                block++;
            rows = (block + 1) * of->n - row < rows ? (block + 1) * of->n - row : rows;
            n = rows * of->cols;
            if (!fill_rows(of, row, rows, out, asked))
                return 0;
        }
        start += n;
        nbytes -= n;
        out += n;
    }
    return 1;
}

/* The last part of a JOIN that starts at or before a position. */
static int64_t part_at(const node *of, int64_t position)
{
    int64_t low = 0, high = of->n;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (of->starts[middle] <= position)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* How many of the bytes from `start` on there are before a part that is left to Python, or the end. */
static int64_t fill_joined(const node *of, int64_t start, int64_t nbytes, byte *out, const request *asked)
{
    int64_t done = 0;
    for (int64_t i = part_at(of, start); done < nbytes && i < of->n; i++) {
        int64_t at = start + done - of->starts[i], n = of->starts[i + 1] - of->starts[i] - at;
        n = n < nbytes - done ? n : nbytes - done;
        if (n <= 0)
            continue;
        const node *part = part_of(of, i);
        if (!part || !fill(part, at, n, out + done, asked))
            break;
        done += n;
    }
    return done;
}

/* Whether no part of these bytes is known to be left to Python. */
static int has_parts(const node *of, int64_t start, int64_t nbytes)
{
    for (int64_t i = part_at(of, start); i < of->n && of->starts[i] < start + nbytes; i++)
        if (of->starts[i] < of->starts[i + 1] && !part_of(of, i))
            return 0;
    return 1;
}

/* 1 when all of it is in `out`. */
static int fill(const node *of, int64_t start, int64_t nbytes, byte *out, const request *asked)
{
    switch (of->kind) {
    case TEXT:
        memcpy(out, of->text + start, (size_t)nbytes);
        return 1;
    case STORED:
        return fill_stored(of, start, nbytes, out);
    case TILES:
        return fill_tiles(of, start, nbytes, out, asked);
    case PART:
        return fill(of->part, of->shift + start, nbytes, out, asked);
    case ORDER:
        return fill_ordered(of, start, nbytes, out, asked);
    case TURN:
        return ckptfs_fill_turned(of, start, nbytes, out, asked);
    case JOIN:
        return fill_joined(of, start, nbytes, out, asked) == nbytes;
    }
    return 0;
}

/* Bytes [start, start + nbytes) of a file, a JOIN: how many of them are in `out` now; the next one is for Python. */
int64_t ckptfs_read(const node *file, int64_t start, int64_t nbytes, byte *out)
{
    request asked = {malloc(SCRATCH + LINE), nbytes}; /* freed a moment ago, and in the cache still */
    int64_t done = asked.scratch ? fill_joined(file, start, nbytes, out, &asked) : 0;
    free(asked.scratch);
    return done;
}

/* Give a JOIN its i-th part, which other threads may be looking for. */
void ckptfs_give_part(node *of, int64_t i, const node *part)
{
    __atomic_store_n(&of->parts[i], part, __ATOMIC_RELEASE);
}

typedef int (*fuse_read)(const char *, char *, size_t, off_t, void *);
static fuse_read in_python;
static size_t handle_at, flags_at;

/* What the callback leaves the rest to, and where in libfuse's `struct fuse_file_info` handle and open flags are. */
void ckptfs_serve(fuse_read python, int64_t handle_offset, int64_t flags_offset)
{
    in_python = python;
    handle_at = (size_t)handle_offset;
    flags_at = (size_t)flags_offset;
}

/* The handle is the address of the open file's JOIN, or an odd number for others. */
static int answer(const char *path, char *out, size_t size, off_t offset, void *info)
{
    uint64_t handle;
    memcpy(&handle, (const byte *)info + handle_at, sizeof handle);
    if (handle & 1)
        return in_python(path, out, size, offset, info);
    const node *file = (const node *)(uintptr_t)handle;
    int64_t nbytes = file->starts[file->n] - (int64_t)offset;
    nbytes = nbytes < (int64_t)size ? nbytes : (int64_t)size;
    if (nbytes <= 0)
        return 0; /* with direct I/O the kernel does not clamp, and readers would loop */
    if (has_parts(file, (int64_t)offset, nbytes) && ckptfs_read(file, (int64_t)offset, nbytes, (byte *)out) == nbytes)
        return (int)nbytes;
    return in_python(path, out, size, offset, info);
}

/* libfuse's callback `read`. */
int ckptfs_fuse_read(const char *path, char *out, size_t size, off_t offset, void *info)
{
    int32_t flags;
    memcpy(&flags, (const byte *)info + flags_at, sizeof flags);
    int done = answer(path, out, size, offset, info);
    ckptfs_answered();
    if (flags & O_DIRECT)
        ckptfs_invite_help(); /* each reader waits for each of its requests, and leaves its processor to us meanwhile */
    return done;
}

/* libfuse's `struct fuse_bufvec` of one buffer in memory, with room for what later versions add. */
typedef struct {
    size_t count, idx, off, size;
    int flags;
    void *mem;
    int fd;
    off_t pos;
    byte more[64];
} reply;

/* libfuse's callback `read_buf`, which brings the memory of its reply along; libfuse frees it.
 *
 * Long ones begin with a page, as what they are copied into does: else the kernel looks each page up twice.
 */
int ckptfs_fuse_read_buf(const char *path, reply **out, size_t size, off_t offset, void *info)
{
    reply *made = calloc(1, sizeof *made);
    if (!made)
        return -ENOMEM;
    if (size < LEAST_ALIGNED)
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
