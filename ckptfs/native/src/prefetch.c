/* Prefetch requests to the kernel, for sources on a disk or on a network.
 *
 * A read of the mount needs some rows of every chunk in a grid row: dozens of small reads, each of which would wait on
 * its own. But these chunks are neighbours in the file, and the next reads need the rest of them. So once reads were
 * seen to wait, whole chunks are requested in advance of a sequential reader and arrive side by side in the page cache.
 * While the source is in memory nothing waits, and nothing is requested.
 */
#define _GNU_SOURCE
#include "program.h"

#include <fcntl.h>
#include <sys/resource.h>

enum {
    MANY_WAITS = 8,             /* of one read: its source is not in memory */
    PATIENCE = 64,              /* prefetch calls without a wait, after which prefetching stops */
    MIN_PREFETCHED = 64 << 10,  /* smaller reads are random: what is near them is not wanted */
    MIN_WINDOW = 8 << 20,       /* how far in advance a source is requested, at least */
    REQUESTS_IN_ADVANCE = 6,    /* this many of the largest requests that the source takes, to hide their latency, */
    MAX_WINDOW = 24 << 20,      /* but no further than this */
    NEAR = 4 << 20,             /* one reader's requests come in any order within this, the read-ahead of the mount */
    MAX_WHOLE = 32 << 20,       /* of larger grid rows only the wanted rows are requested, and no columns in advance */
    MAX_GAP = 16 << 10,         /* parts no further apart are requested together */
    MAX_READERS = 16,
};

/* A sequential reader, and what was requested for it already. */
typedef struct {
    int64_t serial;
    int64_t end;         /* of its last read; in bytes, or in columns of the grid */
    int64_t start, stop; /* requested range: rows or columns of the grid, or bytes */
    int64_t used;
} reader;

static reader readers[MAX_READERS];
static int64_t n_used;
static int busy, patience;

/* How often this thread has waited so far. */
static int64_t count_waits(void)
{
    struct rusage used;
    return getrusage(RUSAGE_THREAD, &used) ? 0 : used.ru_nvcsw;
}

/* Learn from a read that is done; `waits_before` is what the prefetch call before it returned. */
void ckptfs_prefetch_done(int64_t waits_before)
{
    int64_t n = waits_before < 0 ? 0 : count_waits() - waits_before;
    int is_active = __atomic_load_n(&patience, __ATOMIC_RELAXED) > 0;
    if (n >= MANY_WAITS || (n > 1 && is_active))
        __atomic_store_n(&patience, PATIENCE, __ATOMIC_RELAXED);
    if (n >= MANY_WAITS || (n > 0 && is_active))
        ckptfs_wake_spare_threads();
}

/* Whether recent reads have waited. */
static int is_source_slow(void)
{
    return __atomic_load_n(&patience, __ATOMIC_RELAXED) > 0;
}

/* The reader whose last read ended within `near` of this one, or the least recently used one, reset. */
static reader *reader_at(int64_t serial, int64_t start, int64_t stop, int64_t near)
{
    reader *oldest = readers;
    for (reader *r = readers; r < readers + MAX_READERS; r++) {
        if (r->used && r->serial == serial && start <= r->end + near && stop >= r->end - near)
            return r;
        oldest = r->used < oldest->used ? r : oldest;
    }
    *oldest = (reader){.serial = serial, .end = start ? -1 : 0};
    return oldest;
}

/* Extend what was requested for the reader that now reads [start, stop) to `window_end`. 0 when it jumped there.
 *
 * What is left to request begins at *first, which is where the read itself begins at the call. *first and window_end
 * may be in another unit than the read.
 */
static int extend_window(int64_t serial, int64_t start, int64_t stop, int64_t near, int64_t *first, int64_t window_end)
{
    if (__atomic_exchange_n(&busy, 1, __ATOMIC_ACQUIRE)) { /* another thread is here: the next read will do */
        *first = window_end;
        return 1;
    }
    reader *r = reader_at(serial, start, stop, near);
    int is_known = r->end >= 0;
    r->end = stop;
    r->used = ++n_used;
    if (is_known) {
        int follows = *first >= r->start && *first <= r->stop;
        int64_t begin = *first;
        *first = follows ? r->stop : begin;
        r->start = follows ? r->start : begin;
        r->stop = follows && r->stop > window_end ? r->stop : window_end;
    }
    __atomic_store_n(&busy, 0, __ATOMIC_RELEASE);
    return is_known;
}

/* Expect a reader at `start`: it will not count as having jumped there. */
static void expect_reader(int64_t serial, int64_t start)
{
    if (__atomic_exchange_n(&busy, 1, __ATOMIC_ACQUIRE))
        return;
    reader *r = reader_at(serial, start, start, 0);
    r->end = start;
    r->used = ++n_used;
    __atomic_store_n(&busy, 0, __ATOMIC_RELEASE);
}

/* A range of a file that is not requested yet, so that neighbours can join it. */
typedef struct {
    int fd;
    int64_t max_nbytes, max_gap, start, stop;
} range;

/* Request it in parts: the kernel cuts a single request at the read-ahead of the device. */
static void flush(range *r)
{
    for (int64_t at = r->start; at < r->stop; at += r->max_nbytes)
        posix_fadvise(r->fd, (off_t)at, (off_t)min_of(r->stop - at, r->max_nbytes), POSIX_FADV_WILLNEED);
    r->start = r->stop = 0;
}

static void add(range *r, int64_t start, int64_t stop)
{
    if (start >= r->start && start <= r->stop + r->max_gap && r->start < r->stop) {
        r->stop = stop > r->stop ? stop : r->stop;
        return;
    }
    flush(r);
    r->start = start;
    r->stop = stop;
}

/* Rows [top, bottom) of a chunk, unless it was never written. A compressed chunk is smaller than this. */
static void add_chunk(range *r, const program *p, int64_t i, int64_t top, int64_t bottom)
{
    if (p->offsets[i] >= 0)
        add(r, top ? p->starts[i] + top * p->chunk_row_nbytes : p->offsets[i],
            p->starts[i] + bottom * p->chunk_row_nbytes);
}

/* How far in advance of its reader a source is requested. */
static int64_t window_of(const program *p)
{
    int64_t several = min_of(REQUESTS_IN_ADVANCE * p->prefetch_nbytes, MAX_WINDOW);
    return several > MIN_WINDOW ? several : MIN_WINDOW;
}

static void prefetch_rows(const program *p, int64_t start, int64_t nbytes)
{
    int64_t grid_row_nbytes = p->chunk_rows * p->row_nbytes, end = start + nbytes;
    int64_t first = start / grid_row_nbytes, stop = (end - 1) / grid_row_nbytes + 1;
    int64_t window_end = min_of((end + window_of(p) - 1) / grid_row_nbytes + 1, p->grid_rows);
    int whole = extend_window(2 * p->serial, start, end, NEAR, &first, window_end) && grid_row_nbytes <= MAX_WHOLE;
    if (whole)
        stop = window_end;
    if (first >= stop)
        return;
    __atomic_fetch_sub(&patience, 1, __ATOMIC_RELAXED);
    range pending = {.fd = (int)p->fd, .max_nbytes = p->prefetch_nbytes, .max_gap = whole ? MAX_GAP : 0};
    for (int64_t i = first; i < stop; i++) {
        int64_t grid_row_start = i * grid_row_nbytes, grid_row_end = grid_row_start + grid_row_nbytes;
        int64_t top = whole || grid_row_start >= start ? 0 : (start - grid_row_start) / p->row_nbytes;
        int64_t bottom = p->chunk_rows;
        if (!whole && grid_row_end > end)
            bottom = (end - grid_row_start + p->row_nbytes - 1) / p->row_nbytes;
        for (int64_t j = i * p->grid_cols; j < (i + 1) * p->grid_cols; j++)
            add_chunk(&pending, p, j, top, bottom);
    }
    flush(&pending);
}

static void prefetch_columns(const program *p, int64_t first, int64_t count)
{
    int64_t grid_col_nbytes = p->grid_rows * p->chunk_nbytes;
    int64_t more = grid_col_nbytes * count > MAX_WHOLE ? 0 : window_of(p) / grid_col_nbytes + count;
    int64_t begin = first, stop = min_of(first + count + more, p->grid_cols);
    if (!extend_window(2 * p->serial + 1, first, first + count, more, &begin, stop))
        stop = first + count;
    if (begin >= stop)
        return;
    __atomic_fetch_sub(&patience, 1, __ATOMIC_RELAXED);
    range pending = {.fd = (int)p->fd, .max_nbytes = p->prefetch_nbytes, .max_gap = MAX_GAP};
    for (int64_t i = 0; i < p->grid_rows; i++)
        for (int64_t j = begin; j < stop; j++)
            add_chunk(&pending, p, i * p->grid_cols + j, 0, p->chunk_rows);
    flush(&pending);
}

static void prefetch_bytes(const program *p, int64_t start, int64_t nbytes)
{
    int64_t first = p->offset + start, stop = first + nbytes, window_end = stop + window_of(p);
    if (!extend_window(-1 - p->fd, first, stop, NEAR, &first, window_end) || first >= window_end)
        return; /* the kernel reads ahead by itself, though not as far */
    __atomic_fetch_sub(&patience, 1, __ATOMIC_RELAXED);
    range pending = {(int)p->fd, p->prefetch_nbytes, 0, first, window_end};
    flush(&pending);
}

/* Bytes [start, start + nbytes) of CHUNKS, row after row, are read next. Returns a value for ckptfs_prefetch_done. */
int64_t ckptfs_prefetch_rows(const program *p, int64_t start, int64_t nbytes)
{
    if (nbytes < MIN_PREFETCHED)
        return -1;
    if (is_source_slow())
        prefetch_rows(p, start, nbytes);
    return count_waits();
}

/* The same for `count` columns of the chunk grid, for a reader that goes from column to column. */
int64_t ckptfs_prefetch_columns(const program *p, int64_t first, int64_t count)
{
    if (is_source_slow())
        prefetch_columns(p, first, count);
    return count_waits();
}

/* The same for `nbytes` of FILE from `start` on, and for what lies behind them in the file. */
int64_t ckptfs_prefetch_bytes(const program *p, int64_t start, int64_t nbytes)
{
    if (nbytes < MIN_PREFETCHED)
        return -1;
    if (is_source_slow())
        prefetch_bytes(p, start, nbytes);
    return count_waits();
}

/* A reader of the program's bytes from `start` on is expected; there are bytes behind `start`. */
void ckptfs_prefetch_start(const program *p, int64_t start)
{
    if (!is_source_slow())
        return;
    switch (p->kind) {
    case KIND_FILE:
        expect_reader(-1 - p->fd, p->offset + start);
        prefetch_bytes(p, start, 1);
        return;
    case KIND_CHUNKS:
        expect_reader(2 * p->serial, start);
        prefetch_rows(p, start, 1);
        return;
    case KIND_SLICE:
        ckptfs_prefetch_start(p->source, p->offset + start);
        return;
    case KIND_GATHER_ROWS:
        ckptfs_prefetch_start(p->source, p->order[start / p->row_nbytes] * p->row_nbytes);
        return;
    case KIND_TRANSPOSE:
        if (p->source->kind == KIND_CHUNKS)
            prefetch_columns(p->source, 0, 1);
        return;
    case KIND_CONCAT:
        for (int64_t i = 0; i < p->n_sources; i++)
            if (start < p->starts[i + 1]) {
                if (source_of(p, i))
                    ckptfs_prefetch_start(source_of(p, i), start - p->starts[i]);
                return;
            }
    }
}
