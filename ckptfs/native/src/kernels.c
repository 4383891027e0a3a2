/* The loops of ckptfs that pay off in C: rows of neighbouring chunks side by side, transposes, bfloat16 arithmetic.
 *
 * Plain C without Python's headers, called through ctypes (which gives the interpreter lock away). Everything here
 * has a twin in numpy that gives the same bytes: formats/hdf5/chunks_uncompressed.py, tensors/ranges.py, tensors/elementwise.py.
 * Callers check all sizes.
 */
#include "native.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* Raised with every change of a signature: a library left over from an older source must not be called. */
int64_t ckptfs_interface(void)
{
    return 11;
}

/* n bytes; the widths of real chunks' rows get code without a call. */
static inline void copy_line(byte *out, const byte *in, int64_t n)
{
    switch (n) {
    case 64: memcpy(out, in, 64); break;
    case 128: memcpy(out, in, 128); break;
    case 256: memcpy(out, in, 256); break;
    default: memcpy(out, in, (size_t)n);
    }
}

/* n bytes past the caches, as far as they are whole cache lines: these need not be fetched before they are written.
 *
 * A third faster for what is too large for the caches, and no slower before it is read again.
 */
static inline void stream_line(byte *out, const byte *in, int64_t n)
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

/* What was streamed can be seen by whoever hears of it. */
static void end_stream(void)
{
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

enum {
    STREAM = 4 << 20,    /* bytes of a call; smaller ones, such as the kernel's, are read again while they are cached */
    STREAMED_LINE = 256, /* shorter lines have too few whole cache lines */
    STREAMED_ROW = 4096, /* bytes of a row that are put together first: they stay in the first-level cache */
    MOST_PIECES = 256,
};

/* The first place from `at` on that is where `offset` is in a cache line: the kernel copies whole pages faster so. */
static inline byte *like_source(byte *at, int64_t offset)
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

/* One line: the part of row r in chunk i, cut at the edges of what is wanted. */
typedef struct {
    int64_t wide, cols, head, end, pitch;
    byte *out;
    int streamed;
} span;

static inline void place(const span *s, const byte *in, int64_t r, int64_t i)
{
    int64_t left = i * s->wide, width = left + s->wide < s->cols ? s->wide : s->cols - left;
    int64_t at = r * s->cols + left, a = at < s->head ? s->head - at : 0, b = at + width > s->end ? s->end - at : width;
    byte *to = s->out + r * s->pitch + left + a - s->head;
    if (s->streamed && b - a >= STREAMED_LINE)
        stream_line(to, in + a, b - a);
    else if (a < b)
        copy_line(to, in + a, b - a);
}

/* Row r of chunks [first, first + m), none of it cut, past the caches: its lines are put together before.
 *
 * A cache line that belongs to two chunks would otherwise be written in two parts, and be fetched for that.
 */
static void stream_row(const span *s, byte *const *pieces, int64_t in_piece, int64_t r, int64_t first, int64_t m)
{
    byte room[STREAMED_ROW + 2 * LINE];
    byte *to = s->out + r * s->pitch + first * s->wide - s->head;
    for (int64_t i = 0; i < m;) {
        byte *row = like_source(room, (int64_t)(uintptr_t)to);
        int64_t n = 0;
        for (; i < m && n + s->wide <= STREAMED_ROW; i++) {
            int64_t left = (first + i) * s->wide, width = left + s->wide < s->cols ? s->wide : s->cols - left;
            copy_line(row + n, pieces[i] + in_piece, width);
            n += width;
        }
        stream_line(to, row, n);
        to += n;
    }
}

/* Bytes [head, head + nbytes) of rows that lie across `count` neighbouring chunks, into `out`.
 *
 * starts:  where in the file each chunk's elements begin;  skip: bytes of each chunk before the first wanted row
 * wide:    bytes of a chunk's row;  cols: bytes of the matrix's row, at most count * wide
 * pitch:   distance of rows in `out`, which stands for the byte `head` of the first row
 * scratch: scratch_nbytes, at least wide, and LINE more; pieces of several chunks are read into it, then placed row by
 *          row, for whole cache lines of `out` are written faster than parts of them
 * Returns 0, or 1 + the offset where the file ends, or -errno.
 */
static int64_t gather(int fd, const int64_t *starts, int64_t skip, int64_t count, int64_t wide, int64_t cols,
                      int64_t head, int64_t nbytes, byte *out, int64_t pitch, byte *scratch, int64_t scratch_nbytes,
                      int streamed)
{
    span s = {wide, cols, head, head + nbytes, pitch, out, streamed};
    byte *pieces[MOST_PIECES];
    int64_t rows = (s.end + cols - 1) / cols, room = scratch_nbytes / wide;
    int64_t high = rows < room ? rows : room, group = (scratch_nbytes + LINE) / (high * wide + LINE);
    group = group < MOST_PIECES ? group : MOST_PIECES;
    for (int64_t top = 0; top < rows; top += high)
        for (int64_t first = 0; first < count; first += group) {
            int64_t n = rows - top < high ? rows - top : high, m = count - first < group ? count - first : group;
            for (int64_t i = 0; i < m; i++) {
                /* the cut first and last rows may not touch a chunk at all: its bytes are then not even read */
                int64_t left = (first + i) * wide, from = top == 0 && left + wide <= head ? 1 : 0;
                int64_t upto = top + n == rows && (rows - 1) * cols + left >= s.end ? n - 1 : n;
                int64_t source = starts[first + i] + skip + top * wide;
                pieces[i] = like_source(scratch + i * (high * wide + LINE), source);
                if (from >= upto)
                    continue;
                int64_t failed = ckptfs_read_exactly(fd, pieces[i] + from * wide, (upto - from) * wide,
                                                     source + from * wide);
                if (failed)
                    return failed;
            }
            for (int64_t r = 0; r < n; r++) {
                int64_t at = (top + r) * cols;
                if (streamed && wide <= STREAMED_ROW / 2 && at >= head && at + cols <= s.end)
                    stream_row(&s, pieces, r * wide, top + r, first, m);
                else
                    for (int64_t i = 0; i < m; i++)
                        place(&s, pieces[i] + r * wide, top + r, first + i);
            }
        }
    return 0;
}

int64_t ckptfs_gather(int fd, const int64_t *starts, int64_t skip, int64_t count, int64_t wide, int64_t cols,
                      int64_t head, int64_t nbytes, byte *out, int64_t pitch, byte *scratch, int64_t scratch_nbytes)
{
    int streamed = nbytes > STREAM;
    int64_t failed =
        gather(fd, starts, skip, count, wide, cols, head, nbytes, out, pitch, scratch, scratch_nbytes, streamed);
    if (streamed)
        end_stream();
    return failed;
}

/* Bytes [start, start + nbytes) of a matrix, row after row, across as many rows of chunks as they lie in.
 *
 * starts: where each chunk's elements begin, `count` chunks in a row;  high: rows of a chunk.  The others as in gather.
 */
int64_t ckptfs_gather_span(int fd, const int64_t *starts, int64_t count, int64_t high, int64_t wide, int64_t cols,
                           int64_t start, int64_t nbytes, byte *out, byte *scratch, int64_t scratch_nbytes)
{
    const int64_t band = high * cols;
    int streamed = nbytes > STREAM;
    int64_t failed = 0;
    while (nbytes > 0 && !failed) {
        int64_t inside = start % band, n = nbytes < band - inside ? nbytes : band - inside;
        failed = gather(fd, starts + start / band * count, inside / cols * wide, count, wide, cols, inside % cols, n,
                        out, cols, scratch, scratch_nbytes, streamed);
        start += n;
        nbytes -= n;
        out += n;
    }
    if (streamed)
        end_stream();
    return failed;
}

/* Find out about every `step`-th LZ4 chunk, each at its offset and of the size of a plain one of `nbytes`.
 *
 * Those whose state is known are left alone. Returns as gather.
 */
int64_t ckptfs_look(int fd, const int64_t *offsets, int64_t n, int64_t step, int64_t nbytes, byte *states)
{
    byte head[16];
    for (int64_t i = 0; i < n; i += step) {
        if (states[i] != UNKNOWN)
            continue;
        int64_t failed = ckptfs_read_exactly(fd, head, sizeof head, offsets[i]);
        if (failed)
            return failed;
        uint64_t total = big_endian(head, 8), block = big_endian(head + 8, 4), stored = big_endian(head + 12, 4);
        states[i] = total == (uint64_t)nbytes && stored == total && block >= total ? PLAIN : ENCODED;
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

#define TRANSPOSE(name, type)                                                                                          \
    static void name(const byte *in, int64_t in_pitch, byte *out, int64_t out_pitch, int64_t rows, int64_t cols)      \
    {                                                                                                                  \
        for (int64_t c = 0; c < cols; c++)                                                                             \
            for (int64_t r = 0; r < rows; r++)                                                                         \
                memcpy(out + c * out_pitch + r * (int64_t)sizeof(type), in + r * in_pitch + c * (int64_t)sizeof(type), \
                       sizeof(type));                                                                                  \
    }

TRANSPOSE(transpose_1, uint8_t)
TRANSPOSE(transpose_2, uint16_t)
TRANSPOSE(transpose_4, uint32_t)
TRANSPOSE(transpose_8, uint64_t)

/* A tile that fits the first-level cache, by the widest way that there is. */
static void transpose_tile(const byte *in, int64_t in_pitch, byte *out, int64_t out_pitch, int64_t rows, int64_t cols,
                           int64_t size)
{
#if defined(__SSE2__)
    int64_t step = size == 2 ? 8 : 4;
    if ((size == 2 || size == 4) && rows >= step && cols >= step) {
        for (int64_t i = 0; i < cols; i += step)
            for (int64_t j = 0; j < rows; j += step) { /* the last of each is done again in part, whole */
                int64_t c = i + step < cols ? i : cols - step, r = j + step < rows ? j : rows - step;
                const byte *from = in + r * in_pitch + c * size;
                byte *to = out + c * out_pitch + r * size;
                if (size == 2)
                    transpose_8x8(from, in_pitch, to, out_pitch);
                else
                    transpose_4x4(from, in_pitch, to, out_pitch);
            }
        return;
    }
#endif
    void (*one)(const byte *, int64_t, byte *, int64_t, int64_t, int64_t) =
        size == 1 ? transpose_1 : size == 2 ? transpose_2 : size == 4 ? transpose_4 : transpose_8;
    one(in, in_pitch, out, out_pitch, rows, cols);
}

enum { TILE = 64 };

/* out[c][r] = in[r][c] for elements of 1, 2, 4 or 8 bytes; pitches in bytes. */
void ckptfs_transpose(const byte *in, int64_t in_pitch, byte *out, int64_t out_pitch, int64_t rows, int64_t cols,
                      int64_t size)
{
    for (int64_t r = 0; r < rows; r += TILE)
        for (int64_t c = 0; c < cols; c += TILE)
            transpose_tile(in + r * in_pitch + c * size, in_pitch, out + c * out_pitch + r * size, out_pitch,
                           rows - r < TILE ? rows - r : TILE, cols - c < TILE ? cols - c : TILE, size);
}

/* Columns of rows that lie in `count` chunks one below the other, transposed: out[c][r].
 *
 * starts:   where in the file row 0 of each chunk lies, `step` places from one to the next
 * high:     rows of a chunk;  wide: bytes of a chunk's row;  size: bytes of an element
 * row, rows: the wanted rows, counted from the first row of the first chunk;  col, cols: the wanted elements of a row
 * pitch:    distance of the lines of `out`;  scratch: as in gather
 * Returns as gather.
 */
int64_t ckptfs_gather_transposed(int fd, const int64_t *starts, int64_t step, int64_t count, int64_t high, int64_t wide,
                                 int64_t size, int64_t row, int64_t rows, int64_t col, int64_t cols, byte *out,
                                 int64_t pitch, byte *scratch, int64_t scratch_nbytes)
{
    int64_t room = scratch_nbytes / wide;
    for (int64_t i = 0; i < count; i++) {
        int64_t from = row > i * high ? row - i * high : 0;
        int64_t upto = row + rows < (i + 1) * high ? row + rows - i * high : high;
        for (int64_t top = from; top < upto; top += room) {
            int64_t n = upto - top < room ? upto - top : room;
            int64_t source = starts[i * step] + top * wide;
            byte *piece = like_source(scratch, source);
            int64_t failed = ckptfs_read_exactly(fd, piece, n * wide, source);
            if (failed)
                return failed;
            ckptfs_transpose(piece + col * size, wide, out + (i * high + top - row) * size, pitch, n, cols, size);
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
