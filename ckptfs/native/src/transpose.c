/* Transposed matrices: tiles of whole rows, made of columns of chunks.
 *
 * A tile that is asked for in parts is kept until all of it has been: the next request of a sequential reader finds
 * the rest. What single pages need is left to Python, whose cache is larger.
 */
#include "program.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { TILES_KEPT = 16, LEAST_ASKED = 256 << 10 };
enum { FREE, MAKING, READY };

typedef struct {
    int state;
    int64_t tensor, top; /* what it is */
    int64_t nbytes, used, readers, last;
    byte *data;
} tile;

static tile kept[TILES_KEPT];
static int64_t budget, n_asked;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t made = PTHREAD_COND_INITIALIZER;

/* Columns [top, top + count) of a matrix with rows of `line` bytes, as rows of `out`. 0: that is left to Python. */
static int turn(const node *of, int64_t rows, int64_t line, int64_t top, int64_t count, int64_t size, byte *out,
                int64_t pitch, byte *scratch)
{
    if (of->kind == JOIN) {
        for (int64_t i = 0; i < of->n; i++) {
            int64_t nbytes = of->starts[i + 1] - of->starts[i];
            const node *part = part_of(of, i);
            if (!part || nbytes % line || !turn(part, nbytes / line, line, top, count, size, out, pitch, scratch))
                return 0;
            out += nbytes / line * size;
        }
        return 1;
    }
    if (of->kind != TILES || of->cols != line)
        return 0;
    int64_t wide = of->wide / size, bands = (rows + of->high - 1) / of->high;
    int64_t waits = ckptfs_ahead_columns(of, top / wide, (top + count - 1) / wide - top / wide + 1);
    for (int64_t done = 0, n; done < count; done += n) {
        int64_t col = top + done, first = col / wide;
        n = count - done < wide - col % wide ? count - done : wide - col % wide;
        if (!ckptfs_all_plain(of, first, bands, of->n) ||
            ckptfs_gather_transposed((int)of->fd, of->starts + first, of->n, bands, of->high, of->wide, size, 0, rows,
                                     col % wide, n, out + done * pitch, pitch, scratch, SCRATCH))
            return 0;
    }
    ckptfs_waited(waits);
    return 1;
}

static int make(const node *of, int64_t top, int64_t rows, byte *out, const request *asked)
{
    return turn(of->part, of->cols / of->wide, of->nbytes, top, rows, of->wide, out, of->cols, asked->scratch);
}

static void drop(tile *t)
{
    free(t->data);
    t->data = NULL;
    t->state = FREE;
}

/* A free place for a tile of nbytes, for which others may have to go; NULL when there is none. With the lock held. */
static tile *place_for(int64_t nbytes)
{
    for (;;) {
        int64_t sum = nbytes;
        tile *none = NULL, *oldest = NULL;
        for (tile *t = kept; t < kept + TILES_KEPT; t++) {
            if (t->state == FREE)
                none = t;
            else
                sum += t->nbytes;
            if (t->state == READY && !t->readers && (!oldest || t->last < oldest->last))
                oldest = t;
        }
        if (none && sum <= budget)
            return none;
        if (!oldest || nbytes > budget)
            return NULL;
        drop(oldest);
    }
}

/* The place of a tile that is there or being made, NULL when it is neither. With the lock held. */
static tile *kept_tile(const node *of, int64_t top)
{
    for (tile *t = kept; t < kept + TILES_KEPT; t++)
        if (t->state != FREE && t->tensor == of->shift && t->top == top)
            return t;
    return NULL;
}

/* The tile, found or made, with one more reader; NULL when that is left to Python. */
static tile *take(const node *of, int64_t top, int64_t rows, const request *asked)
{
    tile *found;
    pthread_mutex_lock(&lock);
    while ((found = kept_tile(of, top)) && found->state == MAKING)
        pthread_cond_wait(&made, &lock); /* its place may have another tile by then */
    if (!found && asked->asked >= LEAST_ASKED && (found = place_for(rows * of->cols))) {
        *found = (tile){.state = MAKING, .tensor = of->shift, .top = top, .nbytes = rows * of->cols};
        pthread_mutex_unlock(&lock);
        byte *data = malloc((size_t)(rows * of->cols));
        int done = data && make(of, top, rows, data, asked);
        pthread_mutex_lock(&lock);
        found->data = data;
        found->state = READY;
        if (!done) {
            drop(found);
            found = NULL;
        }
        pthread_cond_broadcast(&made);
    }
    if (found) {
        found->readers++;
        found->last = ++n_asked;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static void give_back(tile *t, int64_t used)
{
    pthread_mutex_lock(&lock);
    t->readers--;
    t->used += used;
    if (t->used >= t->nbytes && !t->readers)
        drop(t);
    pthread_mutex_unlock(&lock);
}

int ckptfs_fill_turned(const node *of, int64_t start, int64_t nbytes, byte *out, const request *asked)
{
    while (nbytes > 0) {
        int64_t top = start / of->cols / of->high * of->high, rows = of->n - top < of->high ? of->n - top : of->high;
        int64_t inside = start - top * of->cols, all = rows * of->cols;
        int64_t n = all - inside < nbytes ? all - inside : nbytes;
        if (n == all) {
            if (!make(of, top, rows, out, asked))
                return 0;
        } else {
            tile *t = take(of, top, rows, asked);
            if (!t)
                return 0;
            memcpy(out, t->data + inside, (size_t)n);
            give_back(t, n);
        }
        start += n;
        nbytes -= n;
        out += n;
    }
    return 1;
}

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&lock);
}

/* The threads that were making or reading tiles are not in the child. */
static void in_child(void)
{
    pthread_mutex_unlock(&lock);
    pthread_cond_init(&made, NULL);
    for (tile *t = kept; t < kept + TILES_KEPT; t++) {
        t->readers = 0;
        if (t->state == MAKING)
            t->state = FREE;
    }
}

/* How many bytes of tiles may be kept from now on, none at first; lets go of those that are. */
void ckptfs_keep_tiles(int64_t nbytes)
{
    static int ready;
    pthread_mutex_lock(&lock);
    if (!ready++)
        pthread_atfork(before_fork, after_fork, in_child);
    budget = nbytes;
    for (tile *t = kept; t < kept + TILES_KEPT; t++)
        if (t->state == READY && !t->readers)
            drop(t);
    pthread_mutex_unlock(&lock);
}
