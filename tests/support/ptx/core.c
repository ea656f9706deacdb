/* Executes instructions on a warp's 32 lanes: the common ones of those that the modules beside this file define.

   Those definitions, which are Python's, say what an instruction does; this file computes the same bits. Only where
   several operands are NaN may it choose another one of them. Whatever is unusual (an address that no argument has, lanes
   that do not take part, an order of launches that may be violated) is left to the definitions before anything has
   changed: they say what is wrong. `core.py` compiles this file, and `translate.py` makes operations of a program.

   The lists OF_ONE, OF_TWO and so on have a line for each operation that treats every lane alike. Those that know of other
   lanes, of memory or of the code are in `execute`. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 32
#define FULL 0xFFFFFFFFu

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;

/* One operation on vectors that lie in a warp's file: `d`, `a`, `b` and `c` are bytes from its beginning. */
typedef struct {
    u16 op;
    u16 width;  /* bytes of an element of `d` where it is a register, which only executing lanes write; else 0 */
    s32 d, a, b, c;
    s32 slot;   /* the register's number */
    s64 n;
} Operation;

typedef struct {
    s32 first, count;  /* its operations; a count of -1 leaves the instruction to Python */
    s32 guard;         /* the file's byte at which its predicate is, or -1 */
    s32 negated;
    s32 unknown;       /* the predicate's number, if it is one that may be unknown, or -1 */
} Instruction;

typedef struct {
    u64 begin, size;
    s32 *written, *line_written, *line_cached;
} Region;

typedef struct {
    const Instruction *code;
    const Operation *operations;
    Region *regions;
    const u16 *halves;   /* fp16 of each e4m3 */
    const f32 *wide;     /* fp32 of each e4m3 */
    s32 regions_count, last;
    s32 ordered, running_from, now, emptied;
    s32 waits, stored;
} Launch;

typedef struct {
    u8 *bytes;
    s64 size;
    s64 *stored_at, *storer, *fenced_at, *now;
    s64 fences;
} Shared;

typedef struct {
    u8 *file, *defined;
    Launch *launch;
    Shared *shared;
    s32 together;  /* the place where all lanes are, or -1 */
    s32 number, waited;
    u32 ended;
    s32 at[LANES];
    s32 place;     /* of the instruction that is left to Python, or -1 */
    u32 lanes;     /* that execute it, without its guard */
} Warp;

static inline u32 bits_of(f32 x) { u32 b; memcpy(&b, &x, 4); return b; }
static inline f32 of_bits(u32 b) { f32 x; memcpy(&x, &b, 4); return x; }
static inline u64 bits_of_double(double x) { u64 b; memcpy(&b, &x, 8); return b; }

static inline f32 widen(u16 x) { return of_bits((u32)x << 16); }

static inline u16 narrow(f32 x) {
    u32 b = bits_of(x);
    return x != x ? 0x7FFF : (u16)((b + 0x7FFF + (b >> 16 & 1)) >> 16);
}

/* The numbers below the smallest normal one are multiples of 2**-24: a sum with 2**-24 times 2**23 rounds to them. */
static inline u16 half(f32 x) {
    u32 b = bits_of(x), sign = b >> 16 & 0x8000, m = b & 0x7FFFFFFF;
    u32 small = bits_of(of_bits(m) + 0.5f) - bits_of(0.5f);
    u32 normal = (m - (112u << 23) + 0xFFF + (m >> 13 & 1)) >> 13;
    u32 nan = 0x7C00 | (m >> 13 & 0x3FF) | ((m >> 13 & 0x3FF) == 0);
    u32 found = m < 0x38800000 ? small : normal;
    found = m >= 0x477FF000 ? 0x7C00 : found;
    return (u16)(sign | (m > 0x7F800000 ? nan : found));
}

static inline u16 half_of_double(double x) {
    u64 b = bits_of_double(x), m = b & 0x7FFFFFFFFFFFFFFFull;
    u32 sign = (u32)(b >> 48) & 0x8000, payload = (u32)(m >> 42) & 0x3FF;
    double magnitude = x < 0 ? -x : x;
    if (m > 0x7FF0000000000000ull) return (u16)(sign | 0x7C00 | payload | (payload == 0));
    if (magnitude >= 65520.0) return (u16)(sign | 0x7C00);
    if (magnitude < 0x1p-14) return (u16)(sign | (u32)(bits_of_double(magnitude + 0x1p28) - bits_of_double(0x1p28)));
    return (u16)(sign | (u32)((m - (1008ull << 52) + 0x1FFFFFFFFFFull + (m >> 42 & 1)) >> 42));
}

static inline f32 of_half(u16 h) {
    u32 sign = (u32)(h & 0x8000) << 16, m = h & 0x7FFF;
    u32 normal = (m << 13) + (112u << 23), infinite = (m << 13) + (224u << 23);
    u32 small = bits_of((f32)(s32)m * 0x1p-24f);
    return of_bits(sign | (m < 0x400 ? small : m >= 0x7C00 ? infinite : normal));
}

/* float32 to e4m3, whose smallest numbers are multiples of 2**-9, and whose largest takes what is larger. */
static inline u8 byte_of(f32 x) {
    u32 b = bits_of(x), m = b & 0x7FFFFFFF, sign = b >> 24 & 0x80;
    u32 finite = m > 0x43E00000 ? 0x43E00000 : m;
    u32 small = bits_of(of_bits(finite) + 16384.0f) - bits_of(16384.0f);
    u32 normal = (finite - (120u << 23) + 0x7FFFF + (finite >> 20 & 1)) >> 20;
    return (u8)(sign | (m > 0x7F800000 ? 0x7F : finite < 0x3C800000 ? small : normal));
}

static inline u32 pair(u16 low, u16 high) { return low | (u32)high << 16; }
#define LOW(x) ((u16)(x))
#define HIGH(x) ((u16)((x) >> 16))
#define BF16_PAIR(F) pair(narrow(F(widen(LOW(x)), widen(LOW(y)))), narrow(F(widen(HIGH(x)), widen(HIGH(y)))))
#define F16_PAIR(F) pair(half(F(of_half(LOW(x)), of_half(LOW(y)))), half(F(of_half(HIGH(x)), of_half(HIGH(y)))))
#define ADD(p, q) ((p) + (q))
#define SUB(p, q) ((p) - (q))
#define MUL(p, q) ((p) * (q))
#define FUSED(W, p, q, r) ((double)W(p) * (double)W(q) + (double)W(r))

static inline s32 quotient32(s32 a, s32 b) { return b == -1 ? (s32)(0u - (u32)a) : a / (b ? b : 1); }
static inline s64 quotient64(s64 a, s64 b) { return b == -1 ? (s64)(0ull - (u64)a) : a / (b ? b : 1); }

static inline u64 extracted(u64 word, u32 position, u32 length, s64 bits, int is_signed) {
    s64 end = (s64)position + length, above = 64 - (end < bits ? end : bits);
    above = above < 63 ? above : 63;
    u64 kept = word << above;
    s64 down = above + position < 63 ? above + position : 63;
    u64 found = is_signed ? (u64)((s64)kept >> down) : kept >> down;
    return length ? found : 0;
}

static inline u32 permuted(u32 low, u32 high, u32 choice) {
    u64 both = low | (u64)high << 32;
    u32 found = 0;
    for (int i = 0; i < 4; i++) {
        u32 wanted = choice >> 4 * i & 15, byte = (u32)(both >> (wanted & 7) * 8) & 255;
        found |= (wanted & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
    }
    return found;
}

static inline u32 logic(u32 a, u32 b, u32 c, u32 table) {
    u32 found = 0;
    for (int i = 0; i < 8; i++)
        found |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c) & (0 - (table >> i & 1));
    return found;
}

/* Operations of each lane by itself: name, type of the operands, type of the result, the result. */
#define OF_ONE(X) \
    X(mov_u8, u8, u8, x) \
    X(mov_u16, u16, u16, x) \
    X(mov_u32, u32, u32, x) \
    X(mov_u64, u64, u64, x) \
    X(cvt_u8_u16, u8, u16, x) \
    X(cvt_u8_u32, u8, u32, x) \
    X(cvt_u8_u64, u8, u64, x) \
    X(cvt_s8_u16, s8, u16, x) \
    X(cvt_s8_u32, s8, u32, x) \
    X(cvt_s8_u64, s8, u64, x) \
    X(cvt_u16_u8, u16, u8, x) \
    X(cvt_u16_u32, u16, u32, x) \
    X(cvt_u16_u64, u16, u64, x) \
    X(cvt_s16_u32, s16, u32, x) \
    X(cvt_s16_u64, s16, u64, x) \
    X(cvt_u32_u8, u32, u8, x) \
    X(cvt_u32_u16, u32, u16, x) \
    X(cvt_u32_u64, u32, u64, x) \
    X(cvt_s32_u64, s32, u64, x) \
    X(cvt_u64_u8, u64, u8, x) \
    X(cvt_u64_u16, u64, u16, x) \
    X(cvt_u64_u32, u64, u32, x) \
    X(cvt_u32_f32, u32, f32, (f32)x) \
    X(cvt_s32_f32, s32, f32, (f32)x) \
    X(cvt_s64_f32, s64, f32, (f32)x) \
    X(cvt_u64_f32, u64, f32, (f32)x) \
    X(cvt_f32_s32, f32, s32, x >= -0x1p31f && x < 0x1p31f ? (s32)x : INT32_MIN) \
    X(cvt_f32_f16, f32, u16, half(x)) \
    X(cvt_f16_f32, u16, f32, of_half(x)) \
    X(cvt_f32_bf16, f32, u16, narrow(x)) \
    X(cvt_bf16_f32, u16, f32, widen(x)) \
    X(not_pred, u8, u8, !x) \
    X(not_u16, u16, u16, ~x) \
    X(not_u32, u32, u32, ~x) \
    X(not_u64, u64, u64, ~x) \
    X(neg_u16, u16, u16, 0 - x) \
    X(neg_u32, u32, u32, 0 - x) \
    X(neg_u64, u64, u64, 0 - x) \
    X(neg_f32, u32, u32, x ^ 0x80000000) \
    X(abs_f32, u32, u32, x & 0x7FFFFFFF) \
    X(abs_bf16, u16, u16, x & 0x7FFF) \
    X(abs_s32, s32, u32, x < 0 ? 0u - (u32)x : (u32)x) \
    X(abs_s64, s64, u64, x < 0 ? 0 - (u64)x : (u64)x) \
    X(sqrt_f32, f32, f32, sqrtf(x)) \
    X(rcp_f32, f32, f32, 1.0f / x) \
    X(rsqrt_f32, f32, f32, (f32)(1.0 / sqrt((double)x))) \
    X(ex2_f32, f32, f32, exp2(x)) \
    X(lg2_f32, f32, f32, log2(x)) \
    X(popc_u32, u32, u32, __builtin_popcount(x)) \
    X(popc_u64, u64, u32, __builtin_popcountll(x)) \
    X(clz_u32, u32, u32, x ? __builtin_clz(x) : 32) \
    X(clz_u64, u64, u32, x ? __builtin_clzll(x) : 64)

#define OF_WORDS(X, T) \
    X(add_##T, T, T, x + y) \
    X(sub_##T, T, T, x - y) \
    X(mul_##T, T, T, x * y) \
    X(and_##T, T, T, x & y) \
    X(or_##T, T, T, x | y) \
    X(xor_##T, T, T, x ^ y)
#define OF_ORDER(X, T) \
    X(eq_##T, T, u8, x == y) \
    X(ne_##T, T, u8, x != y) \
    X(lt_##T, T, u8, x < y) \
    X(le_##T, T, u8, x <= y) \
    X(gt_##T, T, u8, x > y) \
    X(ge_##T, T, u8, x >= y)
#define OF_EXTREMES(X, T) \
    X(min_##T, T, T, x < y ? x : y) \
    X(max_##T, T, T, x > y ? x : y)

#define OF_TWO(X) \
    OF_WORDS(X, u16) OF_WORDS(X, u32) OF_WORDS(X, u64) \
    X(and_pred, u8, u8, x & y) \
    X(or_pred, u8, u8, x | y) \
    X(xor_pred, u8, u8, x ^ y) \
    OF_ORDER(X, u16) OF_ORDER(X, s16) OF_ORDER(X, u32) OF_ORDER(X, s32) OF_ORDER(X, u64) OF_ORDER(X, s64) \
    OF_EXTREMES(X, u16) OF_EXTREMES(X, s16) OF_EXTREMES(X, u32) OF_EXTREMES(X, s32) \
    OF_EXTREMES(X, u64) OF_EXTREMES(X, s64) \
    X(eq_f32, f32, u8, x == y) \
    X(ne_f32, f32, u8, x < y || x > y) \
    X(lt_f32, f32, u8, x < y) \
    X(le_f32, f32, u8, x <= y) \
    X(gt_f32, f32, u8, x > y) \
    X(ge_f32, f32, u8, x >= y) \
    X(equ_f32, f32, u8, !(x < y || x > y)) \
    X(neu_f32, f32, u8, x != y) \
    X(ltu_f32, f32, u8, !(x >= y)) \
    X(leu_f32, f32, u8, !(x > y)) \
    X(gtu_f32, f32, u8, !(x <= y)) \
    X(geu_f32, f32, u8, !(x < y)) \
    X(nan_f32, f32, u8, x != x || y != y) \
    X(num_f32, f32, u8, x == x && y == y) \
    X(add_f32, f32, f32, x + y) \
    X(sub_f32, f32, f32, x - y) \
    X(mul_f32, f32, f32, x * y) \
    X(div_f32, f32, f32, x / y) \
    X(min_f32, f32, f32, y != y || x < y ? x : y) \
    X(max_f32, f32, f32, y != y || x > y ? x : y) \
    X(min_nan_f32, f32, f32, x != x || x < y ? x : y) \
    X(max_nan_f32, f32, f32, x != x || x > y ? x : y) \
    X(wide_u16, u16, u32, (u32)x * y) \
    X(wide_s16, s16, u32, (u32)((s32)x * y)) \
    X(wide_u32, u32, u64, (u64)x * y) \
    X(wide_s32, s32, u64, (u64)((s64)x * y)) \
    X(high_u32, u32, u32, (u64)x * y >> 32) \
    X(high_s32, s32, u32, (u64)((s64)x * y) >> 32) \
    X(div_u32, u32, u32, x / (y ? y : 1)) \
    X(rem_u32, u32, u32, x % (y ? y : 1)) \
    X(div_u64, u64, u64, x / (y ? y : 1)) \
    X(rem_u64, u64, u64, x % (y ? y : 1)) \
    X(div_s32, s32, s32, quotient32(x, y)) \
    X(rem_s32, s32, s32, x - quotient32(x, y) * (y ? y : 1)) \
    X(div_s64, s64, s64, quotient64(x, y)) \
    X(rem_s64, s64, s64, x - quotient64(x, y) * (y ? y : 1)) \
    X(add_bf16x2, u32, u32, BF16_PAIR(ADD)) \
    X(sub_bf16x2, u32, u32, BF16_PAIR(SUB)) \
    X(mul_bf16x2, u32, u32, BF16_PAIR(MUL)) \
    X(add_f16x2, u32, u32, F16_PAIR(ADD)) \
    X(sub_f16x2, u32, u32, F16_PAIR(SUB)) \
    X(mul_f16x2, u32, u32, F16_PAIR(MUL)) \
    X(cvt_f32_bf16x2, f32, u32, pair(narrow(y), narrow(x))) \
    X(cvt_f32_f16x2, f32, u32, pair(half(y), half(x))) \
    X(cvt_f32_e4m3x2, f32, u16, byte_of(y) | byte_of(x) << 8)

/* The same, of a word and the number of bits to shift it by. */
#define OF_SHIFTS(X) \
    X(shl_u16, u16, u16, y < 16 ? x << y : 0) \
    X(shl_u32, u32, u32, y < 32 ? x << y : 0) \
    X(shl_u64, u64, u64, y < 64 ? x << y : 0) \
    X(shr_u16, u16, u16, y < 16 ? x >> y : 0) \
    X(shr_u32, u32, u32, y < 32 ? x >> y : 0) \
    X(shr_u64, u64, u64, y < 64 ? x >> y : 0) \
    X(shr_s16, s16, s16, x >> (y < 15 ? y : 15)) \
    X(shr_s32, s32, s32, x >> (y < 31 ? y : 31)) \
    X(shr_s64, s64, s64, x >> (y < 63 ? y : 63))

#define OF_THREE(X) \
    X(fma_f32, f32, f32, (f32)FUSED(, x, y, z)) \
    X(fma_bf16x2, u32, u32, pair(narrow((f32)FUSED(widen, LOW(x), LOW(y), LOW(z))), \
                                 narrow((f32)FUSED(widen, HIGH(x), HIGH(y), HIGH(z))))) \
    X(fma_f16x2, u32, u32, pair(half_of_double(FUSED(of_half, LOW(x), LOW(y), LOW(z))), \
                                half_of_double(FUSED(of_half, HIGH(x), HIGH(y), HIGH(z))))) \
    X(prmt_u32, u32, u32, permuted(x, y, z)) \
    X(lop3_u32, u32, u32, logic(x, y, z, (u32)o->n)) \
    X(shf_l, u32, u32, ((u64)y << 32 | x) << (z & 31) >> 32) \
    X(shf_r, u32, u32, ((u64)y << 32 | x) >> (z & 31))

#define OF_SELECTION(X) \
    X(selp_u16, u16) \
    X(selp_u32, u32) \
    X(selp_u64, u64)
#define OF_FIELDS(X) \
    X(bfe_u32, u32, 32, 0) \
    X(bfe_s32, u32, 32, 1) \
    X(bfe_u64, u64, 64, 0) \
    X(bfe_s64, u64, 64, 1)
#define OF_PIECES(X) X(u8) X(u16) X(u32)

/* Operations that know of other lanes, of memory, or of the code. */
#define OF_WARPS(X) \
    X(nothing) X(defined) X(halves) X(bra) X(ret) X(ld_global) X(ld_shared) X(st_global) X(st_shared) \
    X(ldmatrix) X(stmatrix) X(shfl) X(ballot) X(any) X(all) X(redux) X(elect) X(fence) X(hold) X(atom_global) \
    X(atom_shared) X(mma)

#define NAME1(name, ...) OP_##name,
#define NAME_PIECES(T) OP_get_##T, OP_put_##T,
enum {
    OF_ONE(NAME1) OF_TWO(NAME1) OF_SHIFTS(NAME1) OF_THREE(NAME1) OF_SELECTION(NAME1) OF_FIELDS(NAME1)
    OF_PIECES(NAME_PIECES) OF_WARPS(NAME1) OPERATIONS
};
#define TEXT1(name, ...) #name,
#define TEXT_PIECES(T) "get_" #T, "put_" #T,
const char *const names[] = {
    OF_ONE(TEXT1) OF_TWO(TEXT1) OF_SHIFTS(TEXT1) OF_THREE(TEXT1) OF_SELECTION(TEXT1) OF_FIELDS(TEXT1)
    OF_PIECES(TEXT_PIECES) OF_WARPS(TEXT1) 0
};

#define EACH(BODY) { _Pragma("GCC ivdep") for (int i = 0; i < LANES; i++) { BODY; } }

static inline u32 mask_of(const u8 *lanes) {
    u32 mask = 0;
    for (int i = 0; i < LANES; i++) mask |= (u32)(lanes[i] != 0) << i;
    return mask;
}

static void merge(u8 *restrict to, const u8 *restrict from, int width, u32 lanes) {
    for (int i = 0; i < LANES; i++)
        if (lanes >> i & 1) memcpy(to + i * width, from + i * width, width);
}

static void addresses(const u8 *from, int bytes, s64 offset, u64 *found) {
    if (bytes == 8) {
        const u64 *a = (const u64 *)from;
        EACH(found[i] = a[i] + (u64)offset)
    } else {  /* the sum is as wide as the register */
        const u32 *a = (const u32 *)from;
        EACH(found[i] = (u32)(a[i] + (u32)offset))
    }
}

static int aligned(const u64 *address, u32 lanes, u64 width) {
    u64 any = 0;
    for (int i = 0; i < LANES; i++) any |= lanes >> i & 1 ? address[i] : 0;
    return !(any & (width - 1));
}

static int within_shared(const Shared *shared, const u64 *address, u32 lanes, u64 width) {
    u64 most = 0;
    for (int i = 0; i < LANES; i++) most = lanes >> i & 1 && address[i] > most ? address[i] : most;
    return (s64)most >= 0 && (s64)most <= shared->size - (s64)width && aligned(address, lanes, width);
}

/* Each executing lane's region; 0 unless each has one, and where launches are ordered, all the same. */
static int regions_of(Launch *launch, const u64 *address, u32 lanes, u64 width, Region **found) {
    if (!launch->regions_count || !aligned(address, lanes, width)) return 0;
    Region *last = &launch->regions[launch->last], *first = 0;
    for (int i = 0; i < LANES; i++) {
        if (!(lanes >> i & 1)) continue;
        u64 offset = address[i] - last->begin;
        if (last->size < width || offset > last->size - width) {
            int j = 0;
            for (; j < launch->regions_count; j++) {
                Region *region = &launch->regions[j];
                if (region->size >= width && address[i] - region->begin <= region->size - width) break;
            }
            if (j == launch->regions_count) return 0;
            last = &launch->regions[j];
            launch->last = j;
        }
        if (first && first != last && launch->ordered) return 0;
        first = last;
        found[i] = last;
    }
    return 1;
}

/* As order.py: whether lanes may read, which is noted. */
static int may_read(const Launch *l, Region *const *regions, const u64 *address, u32 lanes, int width, int waited,
                    int cached) {
    if (!l->ordered) return 1;
    int pieces = width < 4 ? 1 : width / 4, since = l->emptied > 1 ? l->emptied : 1;
    u32 lines = 0;
    for (int i = 0; i < LANES; i++) {
        if (!(lanes >> i & 1)) continue;
        const Region *region = regions[i];
        u64 offset = address[i] - region->begin, line = (offset + region->begin % 128) / 128;
        int own = 1;
        for (int j = 0; j < pieces; j++) {
            s32 writer = region->written[offset / 4 + j];
            if (!waited && l->running_from < l->now && writer >= l->running_from) return 0;
            own &= writer == l->now;
        }
        if (!cached || own) continue;
        s32 from = region->line_cached[line];
        if (from >= since && from < region->line_written[line]) return 0;
        lines |= 1u << i;
    }
    for (int i = 0; i < LANES; i++) {
        if (!(lines >> i & 1)) continue;
        s32 *from = &regions[i]->line_cached[(address[i] - regions[i]->begin + regions[i]->begin % 128) / 128];
        *from = *from >= since ? *from : l->now;
    }
    return 1;
}

static void note_writes(Launch *l, Region *const *regions, const u64 *address, u32 lanes, int width) {
    l->stored = 1;
    if (!l->ordered) return;
    int pieces = width < 4 ? 1 : width / 4;
    for (int i = 0; i < LANES; i++) {
        if (!(lanes >> i & 1)) continue;
        u64 offset = address[i] - regions[i]->begin;
        for (int j = 0; j < pieces; j++) regions[i]->written[offset / 4 + j] = l->now;
        regions[i]->line_written[(offset + regions[i]->begin % 128) / 128] = l->now;
    }
}

static void note_shared(Shared *shared, const u64 *address, u32 lanes, int warp) {
    (*shared->now)++;
    if (!shared->fences) return;
    for (int i = 0; i < LANES; i++)
        if (lanes >> i & 1) shared->stored_at[address[i] >> 4] = *shared->now, shared->storer[address[i] >> 4] = warp;
}

/* Copies in whole words: other processes may write them meanwhile. */
static inline void copy(void *to, const void *from, int width) {
    if (width % 4 == 0)
        for (int j = 0; j < width / 4; j++) ((volatile u32 *)to)[j] = ((const volatile u32 *)from)[j];
    else
        memcpy(to, from, width);
}

static void scatter(u8 *to, int element, int count, int lane, const u8 *from) {
    for (int j = 0; j < count; j++) memcpy(to + j * 256 + lane * element, from + j * element, element);
}

/* ld: `count` elements of `element` bytes of each lane, to vectors 256 bytes apart; the others hold zeros. */
static int load(Warp *w, const Operation *o, u32 lanes, int global) {
    int element = (int)(o->c & 255), count = o->c >> 8 & 255, width = element * count, cached = o->c >> 16 & 1;
    u64 address[LANES];
    Region *regions[LANES];
    addresses(w->file + o->a, o->b, o->n, address);
    u8 *to = w->file + o->d, piece[64] = {0};
    if (global) {
        if (!regions_of(w->launch, address, lanes, width, regions)) return 0;
        if (!may_read(w->launch, regions, address, lanes, width, w->waited, cached)) return 0;
    } else if (!within_shared(w->shared, address, lanes, width)) return 0;
    for (int i = 0; i < LANES; i++) {
        if (lanes >> i & 1) copy(piece, global ? (u8 *)address[i] : w->shared->bytes + address[i], width);
        else memset(piece, 0, width);
        scatter(to, element, count, i, piece);
    }
    return 1;
}

/* st: the elements lie in vectors whose places the operations behind this one name. */
static int store(Warp *w, const Operation *o, u32 lanes, int global) {
    int element = (int)(o->c & 255), count = o->c >> 8 & 255, width = element * count;
    u64 address[LANES];
    Region *regions[LANES];
    addresses(w->file + o->a, o->b, o->n, address);
    if (global) {
        if (w->launch->waits && !w->waited) return 0;
        if (!regions_of(w->launch, address, lanes, width, regions)) return 0;
    } else if (!within_shared(w->shared, address, lanes, width)) return 0;
    else note_shared(w->shared, address, lanes, w->number);
    for (int i = 0; i < LANES; i++) {
        if (!(lanes >> i & 1)) continue;
        u8 piece[64];
        for (int j = 0; j < count; j++) memcpy(piece + j * element, w->file + o[1 + j].a + i * element, element);
        copy(global ? (u8 *)address[i] : w->shared->bytes + address[i], piece, width);
    }
    if (global) note_writes(w->launch, regions, address, lanes, width);
    return 1;
}

/* ldmatrix, stmatrix: `count` matrices of 8 x 8 of 16 bits; their registers are those of the operations behind. */
static int matrices(Warp *w, const Operation *o, u32 lanes, int loads) {
    int count = o->c & 255, transposed = o->c >> 8 & 1;
    u32 rows = count == 4 ? FULL : (1u << 8 * count) - 1;
    u64 address[LANES];
    addresses(w->file + o->a, o->b, o->n, address);
    if (lanes != FULL || !within_shared(w->shared, address, rows, 16)) return 0;
    if (!loads) note_shared(w->shared, address, rows, w->number);
    for (int i = 0; i < count; i++) {
        u16 matrix[8][8], *words = (u16 *)(w->file + (loads ? o[1 + i].d : o[1 + i].a));
        if (loads) {
            for (int r = 0; r < 8; r++) memcpy(matrix[r], w->shared->bytes + address[8 * i + r], 16);
            for (int r = 0; r < 8; r++)
                for (int c = 0; c < 8; c++) words[8 * r + c] = transposed ? matrix[c][r] : matrix[r][c];
            w->defined[o[1 + i].slot] = 1;
        } else {
            for (int r = 0; r < 8; r++)
                for (int c = 0; c < 8; c++) matrix[r][c] = transposed ? words[8 * c + r] : words[8 * r + c];
            for (int r = 0; r < 8; r++) memcpy(w->shared->bytes + address[8 * i + r], matrix[r], 16);
        }
    }
    return 1;
}

enum { ATOM_ADD, ATOM_MIN, ATOM_MAX, ATOM_AND, ATOM_OR, ATOM_EXCH };
enum { KIND_U32, KIND_S32, KIND_U64, KIND_S64, KIND_F32 };

#define ATOMIC(T) { \
    T before, value = ((const T *)(w->file + o->b))[i], after; \
    memcpy(&before, at, sizeof before); \
    after = how == ATOM_ADD ? before + value : how == ATOM_MIN ? (value < before ? value : before) \
          : how == ATOM_MAX ? (value > before ? value : before) : value; \
    memcpy(at, &after, sizeof after); \
    if (out) ((T *)out)[i] = before; \
    break; }
#define ATOMIC_BITS(T) { \
    T before, value = ((const T *)(w->file + o->b))[i], after; \
    memcpy(&before, at, sizeof before); \
    after = how == ATOM_AND ? before & value : before | value; \
    memcpy(at, &after, sizeof after); \
    if (out) ((T *)out)[i] = before; \
    break; }

/* atom, red: lane by lane; what was there before goes to `d`, if that is no -1. */
static int atomic(Warp *w, const Operation *o, u32 lanes, int global) {
    int how = o->c & 255, kind = o->c >> 8 & 255, address_bytes = o->c >> 16 & 255;
    int width = kind == KIND_U64 || kind == KIND_S64 ? 8 : 4;
    Launch *l = w->launch;
    u64 address[LANES];
    Region *regions[LANES];
    addresses(w->file + o->a, address_bytes, o->n, address);
    if (global) {
        if (l->waits && !w->waited) return 0;
        if (l->ordered && !w->waited && l->running_from < l->now) return 0;
        if (!regions_of(l, address, lanes, width, regions)) return 0;
    } else if (!within_shared(w->shared, address, lanes, width)) return 0;
    u8 *out = o->d < 0 ? 0 : w->file + o->d;
    if (out) memset(out, 0, LANES * width);
    for (int i = 0; i < LANES; i++) {
        if (!(lanes >> i & 1)) continue;
        u8 *at = global ? (u8 *)address[i] : w->shared->bytes + address[i];
        if (how == ATOM_AND || how == ATOM_OR)
            switch (width) { case 4: ATOMIC_BITS(u32) default: ATOMIC_BITS(u64) }
        else
            switch (kind) {
            case KIND_U32: ATOMIC(u32)
            case KIND_S32: ATOMIC(s32)
            case KIND_U64: ATOMIC(u64)
            case KIND_S64: ATOMIC(s64)
            default: ATOMIC(f32)
            }
        if (!global) note_shared(w->shared, address, 1u << i, w->number);
    }
    if (global) note_writes(l, regions, address, lanes, width);
    return 1;
}

/* prefetch: whether one storage has the bytes, `c` of each lane, or as many as `b` says. */
static int held(Warp *w, const Operation *o, u32 lanes) {
    const Launch *l = w->launch;
    const u64 *address = (const u64 *)(w->file + o->a);
    for (int i = 0; i < LANES; i++) {
        if (!(lanes >> i & 1)) continue;
        u64 begin = address[i] + (u64)o->n, size = o->b < 0 ? 1 : ((const u32 *)(w->file + o->b))[i];
        if (o->b >= 0 && (begin % 16 || size % 16 || size >> 31)) return 0;
        int j = 0;
        while (j < l->regions_count && !(l->regions[j].size >= size && l->regions[j].begin <= begin &&
                                         begin - l->regions[j].begin <= l->regions[j].size - size)) j++;
        if (j == l->regions_count) return 0;
    }
    return 1;
}

#define KIND_OF_REDUX(T) { \
    const T *x = (const T *)a; \
    T found = 0; \
    int any = 0; \
    for (int i = 0; i < LANES; i++) { \
        if (!(lanes >> i & 1)) continue; \
        T y = x[i]; \
        found = !any ? y : how == 0 ? (T)((u32)found + (u32)y) : how == 1 ? (y < found ? y : found) \
              : how == 2 ? (y > found ? y : found) : how == 3 ? found & y : how == 4 ? found | y : found ^ y; \
        any = 1; \
    } \
    for (int i = 0; i < LANES; i++) ((T *)d)[i] = found; }

static int shuffled(const u32 *by, const u32 *value, u32 *d, u32 lanes, int how) {
    u32 found[LANES], missing = 0;
    for (int i = 0; i < LANES; i++) {
        s64 n = by[i], from = how == 0 ? i ^ n : how == 1 ? n & 31 : how == 2 ? i - n : i + n;
        if (from < 0 || from >= LANES) from = i;
        if (lanes >> i & 1) missing |= ~lanes & 1u << from;
        found[i] = value[from];
    }
    if (!missing) memcpy(d, found, sizeof found);
    return !missing;
}

/* The 16-bit floats of `rows` x 16 elements that registers hold as mma has them, and where a sum's are. */
static void left_of(const u32 *const *registers, int bfloat, f32 *a) {
    for (int r = 0; r < 4; r++)
        for (int lane = 0; lane < LANES; lane++) {
            u32 word = registers[r][lane];
            f32 *to = a + (lane / 4 + 8 * (r & 1)) * 16 + 2 * (lane % 4) + 8 * (r >> 1);
            to[0] = bfloat ? widen(LOW(word)) : of_half(LOW(word));
            to[1] = bfloat ? widen(HIGH(word)) : of_half(HIGH(word));
        }
}

static inline int place_of(int registers, int i, int lane) {
    return (lane / 4 + 8 * (i >> 1 & 1)) * 2 * registers + 8 * (i >> 2) + 2 * (lane % 4) + (i & 1);
}

/* a [16, k] times b [k, n]. The products of an element are added from the first to the last. */
static void product(const f32 *restrict a, const f32 *restrict b, f32 *restrict c, int k, int n) {
    for (int r = 0; r < 16; r++) {
        f32 *restrict row = c + r * n;
        for (int j = 0; j < n; j++) row[j] = a[r * k] * b[j];
        for (int i = 1; i < k; i++)
            for (int j = 0; j < n; j++) row[j] += a[r * k + i] * b[i * n + j];
    }
}

/* mma.sync of m16n8k16: the operations behind name four registers of the result, four and two of the factors, and
   four of the sum. */
static void multiply_small(Warp *w, const Operation *o) {
    f32 a[16 * 16], b[16 * 8], c[16 * 8];
    const u32 *registers[4];
    int bfloat = (int)o->n;
    for (int r = 0; r < 4; r++) registers[r] = (const u32 *)(w->file + o[5 + r].a);
    left_of(registers, bfloat, a);
    for (int r = 0; r < 2; r++) {
        const u32 *words = (const u32 *)(w->file + o[9 + r].a);
        for (int lane = 0; lane < LANES; lane++) {
            f32 *to = b + (2 * (lane % 4) + 8 * r) * 8 + lane / 4;
            to[0] = bfloat ? widen(LOW(words[lane])) : of_half(LOW(words[lane]));
            to[8] = bfloat ? widen(HIGH(words[lane])) : of_half(HIGH(words[lane]));
        }
    }
    product(a, b, c, 16, 8);
    for (int r = 0; r < 4; r++) {
        const f32 *add = (const f32 *)(w->file + o[11 + r].a);
        for (int lane = 0; lane < LANES; lane++) c[place_of(4, r, lane)] += add[lane];
    }
    for (int r = 0; r < 4; r++) {
        f32 *to = (f32 *)(w->file + o[1 + r].d);
        for (int lane = 0; lane < LANES; lane++) to[lane] = c[place_of(4, r, lane)];
        w->defined[o[1 + r].slot] = 1;
    }
}

enum { OF_F16, OF_BF16, OF_E4M3, OF_S8 };

static int granule(const Warp *w, u64 address, u8 *found) {
    const Shared *s = w->shared;
    if ((s64)address + 16 > s->size / 2 * 2) return 0;
    if (s->fences) {
        s64 fenced = s->fenced_at[s->storer[address >> 4]], own = s->fenced_at[w->number];
        if (s->stored_at[address >> 4] > (fenced > own ? fenced : own)) return 0;
    }
    memcpy(found, s->bytes + address, 16);
    return 1;
}

/* One of the matrices of a wgmma, as `_tile` of products.py reads it: [rows, k], or [k, rows] where it is `turned`, which
   matrices of s8 never are. 0 where that would say that something is wrong. */
static int tile(const Warp *w, u64 word, int kind, int rows, int first, int transposed, int turned, void *found) {
    static const int modes[] = {0, 3, 2, 1};
    u64 start = (word & 0x3FFF) << 4, leading = (word >> 16 & 0x3FFF) << 4, stride = (word >> 32 & 0x3FFF) << 4;
    int mode = modes[word >> 62];
    if (!mode || word >> 49 & 7) return 0;
    u64 width = 16 << mode, mask = (1 << mode) - 1;
    int columns = kind == OF_E4M3 || kind == OF_S8 ? 32 : 16;
    int down = turned ? 1 : columns, across = turned ? rows : 1;  /* from an element to the next of its column, or row */
    u8 bytes[16];
    u16 *pairs = (u16 *)bytes;
    if (transposed) {
        u64 per = width / 2;
        for (int k = 0; k < 16; k++)
            for (int r = 0; r < rows; r += 8) {
                u64 row = first + r;
                u64 address = start + row % per * 2 + row / per * leading + k % 8 * width + k / 8 * stride;
                if (!granule(w, address ^ (address >> 7 & mask) << 4, bytes)) return 0;
                f32 *to = (f32 *)found + r * down + k * across;
                for (int j = 0; j < 8; j++) to[j * down] = kind == OF_BF16 ? widen(pairs[j]) : of_half(pairs[j]);
            }
        return 1;
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 2; i++) {
            u64 row = first + r, address = start + row / 8 * stride + row % 8 * width + 16 * i;
            if (!granule(w, address ^ (address >> 7 & mask) << 4, bytes)) return 0;
            if (kind == OF_S8) {
                memcpy((s8 *)found + r * 32 + 16 * i, bytes, 16);
            } else if (kind == OF_E4M3) {
                f32 *to = (f32 *)found + r * down + 16 * i * across;
                for (int j = 0; j < 16; j++) to[j * across] = w->launch->wide[bytes[j]];
            } else {
                f32 *to = (f32 *)found + r * down + 8 * i * across;
                for (int j = 0; j < 8; j++) to[j * across] = kind == OF_BF16 ? widen(pairs[j]) : of_half(pairs[j]);
            }
        }
    return 1;
}

/* What a wgmma says: `offsets` and `numbers` are those of the registers of the sums, half as many as columns. */
typedef struct {
    const s32 *offsets, *numbers;
    s32 columns, kind, left_transposed, right_transposed;
} Product;

/* Computes a wgmma, whose left factor is four registers or what a descriptor describes. */
int multiply(Warp *w, const Product *p, const u32 *registers, u64 left, u64 right, int adds) {
    static _Thread_local f32 a[16 * 32], b[256 * 32], c[16 * 256];
    static _Thread_local s8 whole_a[16 * 32], whole_b[256 * 32];
    int n = p->columns, k = p->kind == OF_E4M3 || p->kind == OF_S8 ? 32 : 16, count = n / 2;
    int first = 16 * (w->number % 4);
    void *to_a = p->kind == OF_S8 ? (void *)whole_a : a, *to_b = p->kind == OF_S8 ? (void *)whole_b : b;
    if (registers) {
        const u32 *four[] = {registers, registers + 32, registers + 64, registers + 96};
        left_of(four, p->kind == OF_BF16, a);
    } else if (!tile(w, left, p->kind, 16, first, p->left_transposed, 0, to_a)) return 0;
    if (!tile(w, right, p->kind, n, 0, p->right_transposed, p->kind != OF_S8, to_b)) return 0;
    if (p->kind == OF_S8) {
        for (int r = 0; r < 16; r++)
            for (int j = 0; j < n; j++) {
                s32 sum = 0;
                for (int i = 0; i < 32; i++) sum += (s32)whole_a[r * 32 + i] * whole_b[j * 32 + i];
                ((s32 *)c)[r * n + j] = sum;
            }
    } else {
        product(a, b, c, k, n);
    }
    for (int i = 0; i < count; i++) {
        u32 *to = (u32 *)(w->file + p->offsets[i]);
        for (int lane = 0; lane < LANES; lane++) {
            int at = place_of(count, i, lane);
            if (p->kind == OF_S8)
                to[lane] = ((u32 *)c)[at] + (adds ? to[lane] : 0);
            else
                to[lane] = bits_of(adds ? c[at] + of_bits(to[lane]) : c[at]);
        }
        w->defined[p->numbers[i]] = 1;
    }
    return 1;
}

static void apart(Warp *w) {
    if (w->together >= 0)
        for (int i = 0; i < LANES; i++) w->at[i] = w->together;
    w->together = -1;
}

static void go(Warp *w, u32 lanes, s32 place) {
    if (lanes == FULL) {
        w->together = place;
        return;
    }
    apart(w);
    for (int i = 0; i < LANES; i++)
        if (lanes >> i & 1) w->at[i] = place;
}

/* The place from which the next instruction comes, and the lanes there; 0 where none runs. */
static u32 front(Warp *w) {
    if (w->together >= 0) {
        w->place = w->together;
        return FULL;
    }
    u32 running = ~w->ended, lanes = 0;
    s32 at = INT32_MAX;
    for (int i = 0; i < LANES; i++)
        if (running >> i & 1 && w->at[i] < at) at = w->at[i];
    for (int i = 0; i < LANES; i++) lanes |= (running >> i & 1 && w->at[i] == at) ? 1u << i : 0;
    if (lanes == FULL) w->together = at;
    w->place = lanes ? at : -1;
    return lanes;
}

#define CASE_ONE(name, S, D, R) case OP_##name: { \
    const S *p = (const S *)a; D *q = (D *)d; EACH(S x = p[i]; q[i] = (D)(R)) break; }
#define CASE_TWO(name, S, D, R) case OP_##name: { \
    const S *p = (const S *)a, *r = (const S *)b; D *q = (D *)d; EACH(S x = p[i]; S y = r[i]; q[i] = (D)(R)) break; }
#define CASE_SHIFT(name, S, D, R) case OP_##name: { \
    const S *p = (const S *)a; const u32 *r = (const u32 *)b; D *q = (D *)d; \
    EACH(S x = p[i]; u32 y = r[i]; q[i] = (D)(R)) break; }
#define CASE_THREE(name, S, D, R) case OP_##name: { \
    const S *p = (const S *)a, *r = (const S *)b, *s = (const S *)c; D *q = (D *)d; \
    EACH(S x = p[i]; S y = r[i]; S z = s[i]; q[i] = (D)(R)) break; }
#define CASE_SELECT(name, T) case OP_##name: { \
    const T *p = (const T *)a, *r = (const T *)b; T *q = (T *)d; EACH(q[i] = c[i] ? p[i] : r[i]) break; }
#define CASE_FIELD(name, T, BITS, SIGNED) case OP_##name: { \
    const T *p = (const T *)a; const u32 *r = (const u32 *)b, *s = (const u32 *)c; T *q = (T *)d; \
    EACH(q[i] = (T)extracted(p[i], r[i], s[i], BITS, SIGNED)) break; }
#define CASE_PIECES(T) \
    case OP_get_##T: { T *q = (T *)d; for (int i = 0; i < LANES; i++) q[i] = *(const T *)(a + i * o->b + o->n); break; } \
    case OP_put_##T: { const T *p = (const T *)a; for (int i = 0; i < LANES; i++) *(T *)(d + i * o->b + o->n) = p[i]; break; }

/* The operations of one instruction, by the lanes that execute it; 0 if nothing was done, since Python is to do it. */
static int execute(Warp *w, const Instruction *instruction, u32 lanes) {
    u8 aside[256] __attribute__((aligned(64)));
    const Launch *l = w->launch;
    const Operation *o = l->operations + instruction->first;
    for (const Operation *end = o + instruction->count; o < end; o++) {
        int merges = o->width && lanes != FULL && w->defined[o->slot];
        u8 *d = merges ? aside : w->file + o->d;
        const u8 *a = w->file + o->a, *b = w->file + o->b, *c = w->file + o->c;
        switch (o->op) {
        OF_ONE(CASE_ONE) OF_TWO(CASE_TWO) OF_SHIFTS(CASE_SHIFT) OF_THREE(CASE_THREE)
        OF_SELECTION(CASE_SELECT) OF_FIELDS(CASE_FIELD) OF_PIECES(CASE_PIECES)
        case OP_nothing: break;
        case OP_defined: if (!w->defined[o->n]) return 0; break;
        case OP_halves:
            for (int i = 0; i < LANES; i++) {
                u16 two = ((const u16 *)a)[i];
                ((u32 *)d)[i] = pair(l->halves[two & 255], l->halves[two >> 8]);
            }
            break;
        case OP_bra: go(w, lanes, (s32)o->n); break;
        case OP_ret: apart(w); w->ended |= lanes; break;
        case OP_ld_global: if (!load(w, o, lanes, 1)) return 0; break;
        case OP_ld_shared: if (!load(w, o, lanes, 0)) return 0; break;
        case OP_st_global: return store(w, o, lanes, 1);
        case OP_st_shared: return store(w, o, lanes, 0);
        case OP_ldmatrix: return matrices(w, o, lanes, 1);
        case OP_stmatrix: return matrices(w, o, lanes, 0);
        case OP_atom_global: if (!atomic(w, o, lanes, 1)) return 0; break;
        case OP_atom_shared: if (!atomic(w, o, lanes, 0)) return 0; break;
        case OP_hold: if (!held(w, o, lanes)) return 0; break;
        case OP_mma: if (lanes != FULL) return 0; multiply_small(w, o); return 1;
        case OP_fence: (*w->shared->now)++; w->shared->fenced_at[w->number] = *w->shared->now; break;
        case OP_shfl: if (!shuffled((const u32 *)b, (const u32 *)a, (u32 *)d, lanes, (int)o->n)) return 0; break;
        case OP_ballot: { u32 says = mask_of(a) & lanes; EACH(((u32 *)d)[i] = says) break; }
        case OP_any: memset(d, (mask_of(a) & lanes) != 0, LANES); break;
        case OP_all: memset(d, (mask_of(a) & lanes) == lanes, LANES); break;
        case OP_elect: for (int i = 0; i < LANES; i++) d[i] = (lanes & (0 - lanes)) >> i & 1; break;
        case OP_redux: {
            int how = (int)o->n & 7;
            if (o->n & 8) KIND_OF_REDUX(s32) else KIND_OF_REDUX(u32)
            break;
        }
        default: return 0;
        }
        if (o->width) {
            if (merges) merge(w->file + o->d, aside, o->width, lanes);
            w->defined[o->slot] = 1;
        }
    }
    return 1;
}

/* Executes up to `most` instructions. Returns how many are left of them; `place` is that of an instruction that Python
   is to execute, whose lanes are in `lanes`, or -1 where the turn is over. */
s64 run(Warp *w, s64 most) {
    const Launch *l = w->launch;
    for (; most > 0; most--) {
        u32 lanes = front(w);
        if (!lanes) return most;
        s32 at = w->place;
        const Instruction *instruction = l->code + at;
        u32 executing = lanes;
        if (instruction->count < 0 || (instruction->unknown >= 0 && !w->defined[instruction->unknown])) {
            w->lanes = lanes;
            return most;
        }
        if (instruction->guard >= 0) {
            u32 guard = mask_of(w->file + instruction->guard);
            executing &= instruction->negated ? ~guard : guard;
        }
        go(w, lanes, at + 1);
        if (executing && !execute(w, instruction, executing)) {
            go(w, lanes, at);
            w->place = at;
            w->lanes = lanes;
            return most;
        }
    }
    w->place = -1;
    return 0;
}
