/* Transposed matrices: tiles of whole rows, made of columns of chunks.
 *
 * A tile that is read in parts is kept until all of it has been read, so that a sequential reader's next request finds
 * the rest. Single pages are left to Python, whose cache is larger.
 */
#include "program.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TILES = 16, MIN_REQUEST = 256 << 10 };
enum { FREE, MAKING, READY };

typedef struct {
    int state;
    int64_t serial, top; /* of the tensor; the tile's first row */
    int64_t nbytes, used, readers, last;
    byte *data;
} tile;

static tile tiles[MAX_TILES];
static int64_t budget, n_taken;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t made = PTHREAD_COND_INITIALIZER;

/* What is transposed: columns [col, col + n_cols) of the source become rows of `out`, `pitch` bytes apart. */
typedef struct {
    int64_t row_nbytes, itemsize; /* of the source */
    int64_t col, n_cols, pitch;
    byte *scratch;
} columns;

/* Transpose the columns of `rows` rows of CHUNKS. 0 when Python has to. */
static int transpose_chunks(const program *p, int64_t rows, const columns *c, byte *out)
{
    if (p->kind != KIND_CHUNKS || p->row_nbytes != c->row_nbytes)
        return 0;
    int64_t chunk_cols = p->chunk_row_nbytes / c->itemsize, grid_rows = (rows + p->chunk_rows - 1) / p->chunk_rows;
    int64_t first = c->col / chunk_cols, last = (c->col + c->n_cols - 1) / chunk_cols;
    int64_t waits = ckptfs_prefetch_columns(p, first, last - first + 1);
    for (int64_t done = 0, n; done < c->n_cols; done += n) {
        int64_t col = c->col + done, grid_col = col / chunk_cols;
        n = min_of(c->n_cols - done, chunk_cols - col % chunk_cols);
        if (!ckptfs_all_uncompressed(p, grid_col, grid_rows, p->grid_cols) ||
            ckptfs_gather_transposed((int)p->fd, p->starts + grid_col, p->grid_cols, grid_rows, p->chunk_rows,
                                     p->chunk_row_nbytes, c->itemsize, 0, rows, col % chunk_cols, n,
                                     out + done * c->pitch, c->pitch, c->scratch, SCRATCH))
            return 0;
    }
    ckptfs_prefetch_done(waits);
    return 1;
}

/* The same for `rows` rows of CHUNKS or of a CONCAT of them. */
static int transpose_columns(const program *p, int64_t rows, const columns *c, byte *out)
{
    if (p->kind != KIND_CONCAT)
        return transpose_chunks(p, rows, c, out);
    for (int64_t i = 0; i < p->n_sources; i++) {
        int64_t nbytes = p->starts[i + 1] - p->starts[i], source_rows = nbytes / c->row_nbytes;
        const program *source = source_of(p, i);
        if (!source || nbytes % c->row_nbytes || !transpose_columns(source, source_rows, c, out))
            return 0;
        out += source_rows * c->itemsize;
    }
    return 1;
}

static int make_tile(const program *p, int64_t top, int64_t rows, byte *out, const request *r)
{
    const columns c = {p->source_row_nbytes, p->itemsize, top, rows, p->row_nbytes, r->scratch};
    return transpose_columns(p->source, p->row_nbytes / p->itemsize, &c, out);
}

static void drop(tile *t)
{
    free(t->data);
    t->data = NULL;
    t->state = FREE;
}

/* A free slot for a tile of nbytes, for which others may be dropped; NULL when there is none. Needs the lock. */
static tile *slot_for(int64_t nbytes)
{
    for (;;) {
        int64_t sum = nbytes;
        tile *empty = NULL, *oldest = NULL;
        for (tile *t = tiles; t < tiles + MAX_TILES; t++) {
            if (t->state == FREE)
                empty = t;
            else
                sum += t->nbytes;
            if (t->state == READY && !t->readers && (!oldest || t->last < oldest->last))
                oldest = t;
        }
        if (empty && sum <= budget)
            return empty;
        if (!oldest || nbytes > budget)
            return NULL;
        drop(oldest);
    }
}

/* The slot of a tile that exists or is being made, NULL when there is none. Needs the lock. */
static tile *find_tile(const program *p, int64_t top)
{
    for (tile *t = tiles; t < tiles + MAX_TILES; t++)
        if (t->state != FREE && t->serial == p->serial && t->top == top)
            return t;
    return NULL;
}

/* The tile, found or made, with one more reader; NULL when Python has to read it. */
static tile *take_tile(const program *p, int64_t top, int64_t rows, const request *r)
{
    tile *found;
    pthread_mutex_lock(&lock);
    while ((found = find_tile(p, top)) && found->state == MAKING)
        pthread_cond_wait(&made, &lock); /* its slot may hold another tile by then */
    if (!found && r->nbytes >= MIN_REQUEST && (found = slot_for(rows * p->row_nbytes))) {
        *found = (tile){.state = MAKING, .serial = p->serial, .top = top, .nbytes = rows * p->row_nbytes};
        pthread_mutex_unlock(&lock);
        byte *data = malloc((size_t)(rows * p->row_nbytes));
        int done = data && make_tile(p, top, rows, data, r);
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
        found->last = ++n_taken;
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

int ckptfs_fill_transposed(const program *p, int64_t start, int64_t nbytes, byte *out, const request *r)
{
    while (nbytes > 0) {
        int64_t top = start / p->row_nbytes / p->tile_rows * p->tile_rows, rows = min_of(p->n_rows - top, p->tile_rows);
        int64_t offset = start - top * p->row_nbytes, tile_nbytes = rows * p->row_nbytes;
        int64_t n = min_of(tile_nbytes - offset, nbytes);
        if (n == tile_nbytes) {
            if (!make_tile(p, top, rows, out, r))
                return 0;
        } else {
            tile *t = take_tile(p, top, rows, r);
            if (!t)
                return 0;
            memcpy(out, t->data + offset, (size_t)n);
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

/* The threads that made or read tiles do not exist in the child. */
static void in_child(void)
{
    pthread_mutex_unlock(&lock);
    pthread_cond_init(&made, NULL);
    for (tile *t = tiles; t < tiles + MAX_TILES; t++) {
        t->readers = 0;
        if (t->state == MAKING)
            t->state = FREE;
    }
}

/* Set how many bytes of tiles may be kept, 0 at first; drops the tiles that are kept now. */
void ckptfs_set_tile_budget(int64_t nbytes)
{
    static int is_registered;
    pthread_mutex_lock(&lock);
    if (!is_registered++)
        pthread_atfork(before_fork, after_fork, in_child);
    budget = nbytes;
    for (tile *t = tiles; t < tiles + MAX_TILES; t++)
        if (t->state == READY && !t->readers)
            drop(t);
    pthread_mutex_unlock(&lock);
}
