/* Hints to the kernel about what is going to be read, for sources on a disk or far away.
 *
 * A request wants some rows of every chunk in a row of chunks: dozens of small reads, each of which would wait on its
 * own. But these chunks are neighbours in the file, and the next requests want what is left of them. So once requests
 * were seen to wait, whole chunks are asked for, some way ahead of a sequential reader, and arrive side by side in
 * the page cache. While the source is there already nothing waits, and nothing is asked.
 */
#define _GNU_SOURCE
#include "program.h"

#include <fcntl.h>
#include <sys/resource.h>

enum {
    MANY_WAITS = 8,         /* of one request: its source is not in memory */
    PATIENCE = 64,          /* hints without a wait, after which no more are given */
    LEAST_HINTED = 64 << 10, /* smaller requests are those of random readers, who would get what they never want */
    WINDOW = 8 << 20,       /* how far ahead, at least */
    HINTS_AHEAD = 6,        /* so many of the largest hints that the source takes, to hide how long each of them takes, */
    FARTHEST = 24 << 20,    /* but no further than this */
    NEAR = 4 << 20,         /* requests of one reader come in any order within this, the read-ahead of the mount */
    MOST_WHOLE = 32 << 20,  /* of larger rows of chunks only the wanted rows are asked for, and no columns ahead */
    GAP = 16 << 10,         /* parts no further apart are asked for together */
    READERS = 16,
};

/* A sequential reader: what of it was told already is not told again. */
typedef struct {
    int64_t of;
    int64_t end;        /* behind its last request; in bytes, or in columns of chunks */
    int64_t from, upto; /* what was hinted: rows or columns of chunks, or bytes */
    int64_t used;
} reader;

static reader readers[READERS];
static int64_t n_used;
static int busy, patience;

/* How often this thread has waited for anything so far. */
static int64_t waits(void)
{
    struct rusage used;
    return getrusage(RUSAGE_THREAD, &used) ? 0 : used.ru_nvcsw;
}

/* Learn from a request that has been answered; `before` is what the hint about it returned. */
void ckptfs_waited(int64_t before)
{
    int64_t n = before < 0 ? 0 : waits() - before;
    int patient = __atomic_load_n(&patience, __ATOMIC_RELAXED) > 0;
    if (n >= MANY_WAITS || (n > 1 && patient))
        __atomic_store_n(&patience, PATIENCE, __ATOMIC_RELAXED);
    if (n >= MANY_WAITS || (n > 0 && patient))
        ckptfs_invite_help();
}

/* Whether to give hints. */
static int waiting(void)
{
    return __atomic_load_n(&patience, __ATOMIC_RELAXED) > 0;
}

/* The reader whose last request ended within `near` of this one, or the one unused for longest, begun anew. */
static reader *reader_at(int64_t of, int64_t start, int64_t upto, int64_t near)
{
    reader *oldest = readers;
    for (reader *r = readers; r < readers + READERS; r++) {
        if (r->used && r->of == of && start <= r->end + near && upto >= r->end - near)
            return r;
        oldest = r->used < oldest->used ? r : oldest;
    }
    *oldest = (reader){.of = of, .end = start ? -1 : 0};
    return oldest;
}

/* What a reader that now asks for [start, upto) should be told: *from to *beyond; 0 when it jumped there.
 *
 * first: where what has to be told begins;  beyond: where the window ends. These two may be in another unit.
 */
static int tell(int64_t of, int64_t start, int64_t upto, int64_t near, int64_t first, int64_t *from, int64_t beyond)
{
    if (__atomic_exchange_n(&busy, 1, __ATOMIC_ACQUIRE)) { /* another thread looks: the next request will do */
        *from = beyond;
        return 1;
    }
    reader *r = reader_at(of, start, upto, near);
    int known = r->end >= 0;
    r->end = upto;
    r->used = ++n_used;
    if (known) {
        int follows = first >= r->from && first <= r->upto;
        *from = follows ? r->upto : first;
        r->from = follows ? r->from : first;
        r->upto = follows && r->upto > beyond ? r->upto : beyond;
    }
    __atomic_store_n(&busy, 0, __ATOMIC_RELEASE);
    return known;
}

/* A reader is going to begin at `start`: it will not have jumped there. */
static void begin(int64_t of, int64_t start)
{
    if (__atomic_exchange_n(&busy, 1, __ATOMIC_ACQUIRE))
        return;
    reader *r = reader_at(of, start, start, 0);
    r->end = start;
    r->used = ++n_used;
    __atomic_store_n(&busy, 0, __ATOMIC_RELEASE);
}

typedef struct {
    int fd;
    int64_t step, gap, from, upto;
} range;

/* The kernel cuts a single hint at the read-ahead of the device. */
static void ask(range *r)
{
    for (int64_t at = r->from; at < r->upto; at += r->step)
        posix_fadvise(r->fd, (off_t)at, (off_t)(r->upto - at < r->step ? r->upto - at : r->step), POSIX_FADV_WILLNEED);
    r->from = r->upto = 0;
}

static void add(range *r, int64_t from, int64_t upto)
{
    if (from >= r->from && from <= r->upto + r->gap && r->from < r->upto) {
        r->upto = upto > r->upto ? upto : r->upto;
        return;
    }
    ask(r);
    r->from = from;
    r->upto = upto;
}

static void add_chunk(range *r, const node *of, int64_t i, int64_t top, int64_t bottom)
{
    if (of->offsets[i] >= 0) /* it was written; chunks that were packed are smaller than this */
        add(r, top ? of->starts[i] + top * of->wide : of->offsets[i], of->starts[i] + bottom * of->wide);
}

/* How far ahead of its reader a source is asked. */
static int64_t window(const node *of)
{
    int64_t several = HINTS_AHEAD * of->step < FARTHEST ? HINTS_AHEAD * of->step : FARTHEST;
    return several > WINDOW ? several : WINDOW;
}

static void rows(const node *of, int64_t start, int64_t nbytes)
{
    int64_t band = of->high * of->cols, end = start + nbytes, from = start / band, upto = (end - 1) / band + 1;
    int64_t beyond = (end + window(of) - 1) / band + 1;
    beyond = beyond < of->shift ? beyond : of->shift;
    int whole = tell(2 * of->name, start, end, NEAR, from, &from, beyond) && band <= MOST_WHOLE;
    if (whole)
        upto = beyond;
    if (from >= upto)
        return;
    __atomic_fetch_sub(&patience, 1, __ATOMIC_RELAXED);
    range asked = {.fd = (int)of->fd, .step = of->step, .gap = whole ? GAP : 0};
    for (int64_t b = from; b < upto; b++) {
        int64_t top = whole || b * band >= start ? 0 : (start - b * band) / of->cols;
        int64_t bottom = whole || (b + 1) * band <= end ? of->high : (end - b * band + of->cols - 1) / of->cols;
        for (int64_t i = b * of->n; i < (b + 1) * of->n; i++)
            add_chunk(&asked, of, i, top, bottom);
    }
    ask(&asked);
}

static void columns(const node *of, int64_t first, int64_t count)
{
    int64_t nbytes = of->shift * of->nbytes, more = nbytes * count > MOST_WHOLE ? 0 : window(of) / nbytes + count;
    int64_t from = first, upto = first + count + more < of->n ? first + count + more : of->n;
    if (!tell(2 * of->name + 1, first, first + count, more, first, &from, upto))
        upto = first + count;
    if (from >= upto)
        return;
    __atomic_fetch_sub(&patience, 1, __ATOMIC_RELAXED);
    range asked = {.fd = (int)of->fd, .step = of->step, .gap = GAP};
    for (int64_t b = 0; b < of->shift; b++)
        for (int64_t i = from; i < upto; i++)
            add_chunk(&asked, of, b * of->n + i, 0, of->high);
    ask(&asked);
}

static void bytes(const node *of, int64_t start, int64_t nbytes)
{
    int64_t from = of->shift + start, upto = from + nbytes, beyond = upto + window(of);
    if (!tell(-1 - of->fd, from, upto, NEAR, from, &from, beyond) || from >= beyond)
        return; /* the kernel reads ahead by itself, though not as far */
    __atomic_fetch_sub(&patience, 1, __ATOMIC_RELAXED);
    range asked = {(int)of->fd, of->step, 0, from, beyond};
    ask(&asked);
}

/* Bytes [start, start + nbytes) of TILES, row after row, are going to be read; for ckptfs_waited. */
int64_t ckptfs_ahead_rows(const node *of, int64_t start, int64_t nbytes)
{
    if (nbytes < LEAST_HINTED)
        return -1;
    if (waiting())
        rows(of, start, nbytes);
    return waits();
}

/* The same of `count` columns of chunks from the one at `first` on, for a reader that goes from column to column. */
int64_t ckptfs_ahead_columns(const node *of, int64_t first, int64_t count)
{
    if (waiting())
        columns(of, first, count);
    return waits();
}

/* The same of `nbytes` of STORED from `start` on, and of what lies behind them in the file. */
int64_t ckptfs_ahead_bytes(const node *of, int64_t start, int64_t nbytes)
{
    if (nbytes < LEAST_HINTED)
        return -1;
    if (waiting())
        bytes(of, start, nbytes);
    return waits();
}

/* The bytes of a node from `start` on, of which there are some, will be read by somebody who has not asked yet. */
void ckptfs_expect(const node *of, int64_t start)
{
    if (!waiting())
        return;
    switch (of->kind) {
    case STORED:
        begin(-1 - of->fd, of->shift + start);
        bytes(of, start, 1);
        return;
    case TILES:
        begin(2 * of->name, start);
        rows(of, start, 1);
        return;
    case PART:
        ckptfs_expect(of->part, of->shift + start);
        return;
    case ORDER:
        ckptfs_expect(of->part, of->order[start / of->cols] * of->cols);
        return;
    case TURN:
        if (of->part->kind == TILES)
            columns(of->part, 0, 1);
        return;
    case JOIN:
        for (int64_t i = 0; i < of->n; i++)
            if (start < of->starts[i + 1]) {
                if (part_of(of, i))
                    ckptfs_expect(part_of(of, i), start - of->starts[i]);
                return;
            }
    }
}
