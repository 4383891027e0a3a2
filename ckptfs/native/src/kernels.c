/* The inner loops that pay off in C: rows of neighbouring chunks side by side, transposes, bfloat16 arithmetic.
 *
 * Plain C without Python's headers, called through ctypes, which releases the interpreter lock. Each loop has a twin in
 * numpy that gives the same bytes: formats/hdf5/chunks_uncompressed.py, tensors/ranges.py, tensors/elementwise.py.
 * Callers check all sizes.
 */
#include "native.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* Raised with every change of a signature, so that a library built from older source is not called. */
int64_t ckptfs_interface(void)
{
    return 12;
}

/* Copy n bytes; the sizes of real chunks' rows are copied without a call. */
static inline void copy_bytes(byte *out, const byte *in, int64_t n)
{
    switch (n) {
    case 64: memcpy(out, in, 64); break;
    case 128: memcpy(out, in, 128); break;
    case 256: memcpy(out, in, 256); break;
    default: memcpy(out, in, (size_t)n);
    }
}

/* Copy n bytes past the caches, as far as they are whole cache lines: these are then not fetched before the write.
 *
 * A third faster for what is too large for the caches, and no slower before it is read again.
 */
static inline void stream_bytes(byte *out, const byte *in, int64_t n)
{
#if defined(__SSE2__)
    int64_t head = (int64_t)(-(uintptr_t)out & 63);
    memcpy(out, in, (size_t)head);
    for (; head + 64 <= n; head += 64)
        for (int64_t i = head; i < head + 64; i += 16)
            _mm_stream_si128((__m128i *)(out + i), _mm_loadu_si128((const __m128i *)(in + i)));
    memcpy(out + head, in + head, (size_t)(n - head));
#else
    memcpy(out, in, (size_t)n);
#endif
}

/* Make streamed bytes visible to other threads. */
static void end_stream(void)
{
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

enum {
    MIN_STREAMED = 4 << 20,   /* bytes of a call; smaller ones, such as the kernel's, are read again while cached */
    MIN_STREAMED_PART = 256,  /* shorter parts have too few whole cache lines */
    MAX_STREAMED_ROW = 4096,  /* bytes of a row that are assembled first: they stay in the first-level cache */
    MAX_PIECES = 256,
};

/* The first place from `at` on whose position in its cache line is that of `offset`: the kernel copies faster so. */
static inline byte *aligned_like(byte *at, int64_t offset)
{
    return at + ((offset - (int64_t)(uintptr_t)at) & (LINE - 1));
}

int64_t ckptfs_read_exactly(int fd, byte *out, int64_t n, int64_t offset)
{
    while (n > 0) {
        ssize_t got = pread(fd, out, (size_t)n, (off_t)offset);
        if (got < 0) {
            if (errno == EINTR)
                continue;
            return -(int64_t)errno;
        }
        if (got == 0)
            return offset + 1;
        out += got;
        n -= got;
        offset += got;
    }
    return 0;
}

/* Bytes [head, end) of rows that lie across neighbouring chunks, and where they go. */
typedef struct {
    int64_t chunk_row_nbytes, row_nbytes, head, end, pitch;
    byte *out;
    int streamed;
} target;

/* Put the part of row r that lies in chunk i into place, cut at the edges of the target. */
static inline void put_part(const target *t, const byte *in, int64_t r, int64_t i)
{
    int64_t left = i * t->chunk_row_nbytes, width = min_of(t->row_nbytes - left, t->chunk_row_nbytes);
    int64_t at = r * t->row_nbytes + left;
    int64_t a = at < t->head ? t->head - at : 0, b = at + width > t->end ? t->end - at : width;
    byte *to = t->out + r * t->pitch + left + a - t->head;
    if (t->streamed && b - a >= MIN_STREAMED_PART)
        stream_bytes(to, in + a, b - a);
    else if (a < b)
        copy_bytes(to, in + a, b - a);
}

/* Row r of chunks [first, first + m), none of it cut, past the caches: its parts are assembled first.
 *
 * A cache line that belongs to two chunks would otherwise be written in two parts, and be fetched for that.
 */
static void stream_row(const target *t, byte *const *pieces, int64_t in_piece, int64_t r, int64_t first, int64_t m)
{
    byte assembled[MAX_STREAMED_ROW + 2 * LINE];
    byte *to = t->out + r * t->pitch + first * t->chunk_row_nbytes - t->head;
    for (int64_t i = 0; i < m;) {
        byte *row = aligned_like(assembled, (int64_t)(uintptr_t)to);
        int64_t n = 0;
        for (; i < m && n + t->chunk_row_nbytes <= MAX_STREAMED_ROW; i++) {
            int64_t left = (first + i) * t->chunk_row_nbytes, width = min_of(t->row_nbytes - left, t->chunk_row_nbytes);
            copy_bytes(row + n, pieces[i] + in_piece, width);
            n += width;
        }
        stream_bytes(to, row, n);
        to += n;
    }
}

/* Bytes [head, head + nbytes) of rows that lie across `count` neighbouring chunks, into `out`.
 *
 * starts:  where in the file each chunk's elements begin;  skip: bytes of each chunk before the first wanted row
 * chunk_row_nbytes: bytes of a chunk's row;  row_nbytes: of the matrix's row, at most count * chunk_row_nbytes
 * pitch:   distance of rows in `out`, which begins with the byte `head` of the first row
 * scratch: scratch_nbytes, at least chunk_row_nbytes, and LINE more. Pieces of several chunks are read into it, then
 *          placed row by row, because whole cache lines of `out` are written faster than parts of them
 * Returns 0, or 1 + the offset where the file ends, or -errno.
 */
static int64_t gather(int fd, const int64_t *starts, int64_t skip, int64_t count, int64_t chunk_row_nbytes,
                      int64_t row_nbytes, int64_t head, int64_t nbytes, byte *out, int64_t pitch, byte *scratch,
                      int64_t scratch_nbytes, int streamed)
{
    target t = {chunk_row_nbytes, row_nbytes, head, head + nbytes, pitch, out, streamed};
    byte *pieces[MAX_PIECES];
    int64_t rows = (t.end + row_nbytes - 1) / row_nbytes, piece_rows = min_of(rows, scratch_nbytes / chunk_row_nbytes);
    int64_t piece_nbytes = piece_rows * chunk_row_nbytes + LINE;
    int64_t group = min_of((scratch_nbytes + LINE) / piece_nbytes, MAX_PIECES);
    for (int64_t top = 0; top < rows; top += piece_rows)
        for (int64_t first = 0; first < count; first += group) {
            int64_t n = min_of(rows - top, piece_rows), m = min_of(count - first, group);
            for (int64_t i = 0; i < m; i++) {
                /* a cut first or last row may not touch a chunk at all: its bytes are then not even read */
                int64_t left = (first + i) * chunk_row_nbytes, from = top == 0 && left + chunk_row_nbytes <= head;
                int64_t stop = top + n == rows && (rows - 1) * row_nbytes + left >= t.end ? n - 1 : n;
                int64_t source = starts[first + i] + skip + top * chunk_row_nbytes;
                pieces[i] = aligned_like(scratch + i * piece_nbytes, source);
                if (from >= stop)
                    continue;
                int64_t skipped = from * chunk_row_nbytes, wanted = (stop - from) * chunk_row_nbytes;
                int64_t failed = ckptfs_read_exactly(fd, pieces[i] + skipped, wanted, source + skipped);
                if (failed)
                    return failed;
            }
            for (int64_t r = 0; r < n; r++) {
                int64_t at = (top + r) * row_nbytes, in_piece = r * chunk_row_nbytes;
                if (streamed && chunk_row_nbytes <= MAX_STREAMED_ROW / 2 && at >= head && at + row_nbytes <= t.end)
                    stream_row(&t, pieces, in_piece, top + r, first, m);
                else
                    for (int64_t i = 0; i < m; i++)
                        put_part(&t, pieces[i] + in_piece, top + r, first + i);
            }
        }
    return 0;
}

int64_t ckptfs_gather(int fd, const int64_t *starts, int64_t skip, int64_t count, int64_t chunk_row_nbytes,
                      int64_t row_nbytes, int64_t head, int64_t nbytes, byte *out, int64_t pitch, byte *scratch,
                      int64_t scratch_nbytes)
{
    int streamed = nbytes > MIN_STREAMED;
    int64_t failed = gather(fd, starts, skip, count, chunk_row_nbytes, row_nbytes, head, nbytes, out, pitch, scratch,
                            scratch_nbytes, streamed);
    if (streamed)
        end_stream();
    return failed;
}

/* Bytes [start, start + nbytes) of a matrix, row after row, across as many grid rows as they lie in.
 *
 * starts: where each chunk's elements begin, `grid_cols` chunks in a grid row;  chunk_rows: rows of a chunk. The other
 * arguments as in gather.
 */
int64_t ckptfs_gather_range(int fd, const int64_t *starts, int64_t grid_cols, int64_t chunk_rows,
                            int64_t chunk_row_nbytes, int64_t row_nbytes, int64_t start, int64_t nbytes, byte *out,
                            byte *scratch, int64_t scratch_nbytes)
{
    const int64_t grid_row_nbytes = chunk_rows * row_nbytes;
    int streamed = nbytes > MIN_STREAMED;
    int64_t failed = 0;
    while (nbytes > 0 && !failed) {
        int64_t offset = start % grid_row_nbytes, n = min_of(nbytes, grid_row_nbytes - offset);
        failed = gather(fd, starts + start / grid_row_nbytes * grid_cols, offset / row_nbytes * chunk_row_nbytes,
                        grid_cols, chunk_row_nbytes, row_nbytes, offset % row_nbytes, n, out, row_nbytes, scratch,
                        scratch_nbytes, streamed);
        start += n;
        nbytes -= n;
        out += n;
    }
    if (streamed)
        end_stream();
    return failed;
}

/* Set the state of every `step`-th LZ4 chunk that is UNKNOWN, each at its offset and of the size of an uncompressed one
 * of `nbytes`. Returns as gather.
 */
int64_t ckptfs_classify_chunks(int fd, const int64_t *offsets, int64_t n, int64_t step, int64_t nbytes, byte *states)
{
    byte head[16];
    for (int64_t i = 0; i < n; i += step) {
        if (states[i] != UNKNOWN)
            continue;
        int64_t failed = ckptfs_read_exactly(fd, head, sizeof head, offsets[i]);
        if (failed)
            return failed;
        uint64_t total = big_endian(head, 8), block = big_endian(head + 8, 4), stored = big_endian(head + 12, 4);
        states[i] = total == (uint64_t)nbytes && stored == total && block >= total ? UNCOMPRESSED : ENCODED;
    }
    return 0;
}

#if defined(__SSE2__)
/* 8 x 8 elements of two bytes. */
static inline void transpose_8x8(const byte *in, int64_t in_pitch, byte *out, int64_t out_pitch)
{
    __m128i r[8], s[8];
    for (int i = 0; i < 8; i++)
        r[i] = _mm_loadu_si128((const __m128i *)(in + i * in_pitch));
    for (int i = 0; i < 4; i++) {
        s[2 * i] = _mm_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
        s[2 * i + 1] = _mm_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
    }
    r[0] = _mm_unpacklo_epi32(s[0], s[2]);
    r[1] = _mm_unpackhi_epi32(s[0], s[2]);
    r[2] = _mm_unpacklo_epi32(s[1], s[3]);
    r[3] = _mm_unpackhi_epi32(s[1], s[3]);
    r[4] = _mm_unpacklo_epi32(s[4], s[6]);
    r[5] = _mm_unpackhi_epi32(s[4], s[6]);
    r[6] = _mm_unpacklo_epi32(s[5], s[7]);
    r[7] = _mm_unpackhi_epi32(s[5], s[7]);
    for (int i = 0; i < 4; i++) {
        _mm_storeu_si128((__m128i *)(out + 2 * i * out_pitch), _mm_unpacklo_epi64(r[i], r[i + 4]));
        _mm_storeu_si128((__m128i *)(out + (2 * i + 1) * out_pitch), _mm_unpackhi_epi64(r[i], r[i + 4]));
    }
}

/* 4 x 4 elements of four bytes. */
static inline void transpose_4x4(const byte *in, int64_t in_pitch, byte *out, int64_t out_pitch)
{
    __m128i a = _mm_loadu_si128((const __m128i *)in), b = _mm_loadu_si128((const __m128i *)(in + in_pitch));
    __m128i c = _mm_loadu_si128((const __m128i *)(in + 2 * in_pitch));
    __m128i d = _mm_loadu_si128((const __m128i *)(in + 3 * in_pitch));
    __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
    __m128i AB = _mm_unpackhi_epi32(a, b), CD = _mm_unpackhi_epi32(c, d);
    _mm_storeu_si128((__m128i *)out, _mm_unpacklo_epi64(ab, cd));
    _mm_storeu_si128((__m128i *)(out + out_pitch), _mm_unpackhi_epi64(ab, cd));
    _mm_storeu_si128((__m128i *)(out + 2 * out_pitch), _mm_unpacklo_epi64(AB, CD));
    _mm_storeu_si128((__m128i *)(out + 3 * out_pitch), _mm_unpackhi_epi64(AB, CD));
}
#endif

#define DEFINE_TRANSPOSE(name, type)                                                                                   \
    static void name(const byte *in, int64_t in_pitch, byte *out, int64_t out_pitch, int64_t rows, int64_t cols)      \
    {                                                                                                                  \
        for (int64_t c = 0; c < cols; c++)                                                                             \
            for (int64_t r = 0; r < rows; r++)                                                                         \
                memcpy(out + c * out_pitch + r * (int64_t)sizeof(type), in + r * in_pitch + c * (int64_t)sizeof(type), \
                       sizeof(type));                                                                                  \
    }

DEFINE_TRANSPOSE(transpose_1, uint8_t)
DEFINE_TRANSPOSE(transpose_2, uint16_t)
DEFINE_TRANSPOSE(transpose_4, uint32_t)
DEFINE_TRANSPOSE(transpose_8, uint64_t)

/* Transpose a tile that fits the first-level cache, with the widest instructions that there are. */
static void transpose_tile(const byte *in, int64_t in_pitch, byte *out, int64_t out_pitch, int64_t rows, int64_t cols,
                           int64_t itemsize)
{
#if defined(__SSE2__)
    int64_t step = itemsize == 2 ? 8 : 4;
    if ((itemsize == 2 || itemsize == 4) && rows >= step && cols >= step) {
        for (int64_t i = 0; i < cols; i += step)
            for (int64_t j = 0; j < rows; j += step) { /* the last square overlaps the one before */
                int64_t c = min_of(i, cols - step), r = min_of(j, rows - step);
                const byte *from = in + r * in_pitch + c * itemsize;
                byte *to = out + c * out_pitch + r * itemsize;
                if (itemsize == 2)
                    transpose_8x8(from, in_pitch, to, out_pitch);
                else
                    transpose_4x4(from, in_pitch, to, out_pitch);
            }
        return;
    }
#endif
    void (*one)(const byte *, int64_t, byte *, int64_t, int64_t, int64_t) =
        itemsize == 1 ? transpose_1 : itemsize == 2 ? transpose_2 : itemsize == 4 ? transpose_4 : transpose_8;
    one(in, in_pitch, out, out_pitch, rows, cols);
}

enum { TILE = 64 };

/* out[c][r] = in[r][c] for elements of 1, 2, 4 or 8 bytes; pitches in bytes. */
void ckptfs_transpose(const byte *in, int64_t in_pitch, byte *out, int64_t out_pitch, int64_t rows, int64_t cols,
                      int64_t itemsize)
{
    for (int64_t r = 0; r < rows; r += TILE)
        for (int64_t c = 0; c < cols; c += TILE)
            transpose_tile(in + r * in_pitch + c * itemsize, in_pitch, out + c * out_pitch + r * itemsize, out_pitch,
                           min_of(rows - r, TILE), min_of(cols - c, TILE), itemsize);
}

/* Columns of rows that lie in `count` chunks one below the other, transposed: out[c][r].
 *
 * starts:     where in the file row 0 of each chunk lies, `step` places from one to the next
 * chunk_rows: rows of a chunk;  chunk_row_nbytes: bytes of its row;  itemsize: bytes of an element
 * row, rows:  the wanted rows, counted from the first row of the first chunk;  col, cols: the wanted elements of a row
 * pitch:      distance of the rows of `out`;  scratch: as in gather
 * Returns as gather.
 */
int64_t ckptfs_gather_transposed(int fd, const int64_t *starts, int64_t step, int64_t count, int64_t chunk_rows,
                                 int64_t chunk_row_nbytes, int64_t itemsize, int64_t row, int64_t rows, int64_t col,
                                 int64_t cols, byte *out, int64_t pitch, byte *scratch, int64_t scratch_nbytes)
{
    int64_t max_rows = scratch_nbytes / chunk_row_nbytes;
    for (int64_t i = 0; i < count; i++) {
        int64_t above = i * chunk_rows; /* rows of the chunks above this one */
        int64_t start = row > above ? row - above : 0;
        int64_t stop = min_of(row + rows - above, chunk_rows);
        for (int64_t top = start; top < stop; top += max_rows) {
            int64_t n = min_of(stop - top, max_rows);
            int64_t source = starts[i * step] + top * chunk_row_nbytes;
            byte *piece = aligned_like(scratch, source);
            int64_t failed = ckptfs_read_exactly(fd, piece, n * chunk_row_nbytes, source);
            if (failed)
                return failed;
            ckptfs_transpose(piece + col * itemsize, chunk_row_nbytes, out + (above + top - row) * itemsize, pitch, n,
                             cols, itemsize);
        }
    }
    return 0;
}

static inline float widened(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* To nearest even; a NaN becomes the quiet one of its sign, as in ml_dtypes. */
static inline uint16_t rounded(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t near = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = (bits >> 16 & 0x8000) | 0x7fc0;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : near);
}

/* One step on n bfloat16 numbers in place: 0 multiply, 1 divide, 2 add, each in float32, rounded once. */
void ckptfs_bfloat16(uint16_t *data, int64_t n, int64_t kind, double scalar)
{
    const float s = (float)scalar;
    if (kind == 0)
        for (int64_t i = 0; i < n; i++)
            data[i] = rounded(widened(data[i]) * s);
    else if (kind == 1)
        for (int64_t i = 0; i < n; i++)
            data[i] = rounded(widened(data[i]) / s);
    else
        for (int64_t i = 0; i < n; i++)
            data[i] = rounded(widened(data[i]) + s);
}
