// Points of edwards25519, one to a thread: -x^2 + y^2 = 1 + d x^2 y^2 modulo p = 2^255 - 19.
//
// A field element in flight is eight words, any representative below 2^256; `canonical` gives the one below p. Rows in
// memory come in two forms, and how many words a row has says which:
//     24  as read:  y + x, y - x, 2 d x y
//     32  as made:  X, Y, Z, T with x = X / Z, y = Y / Z, T = X Y / Z
// Scalars are secret: what a thread does, and which addresses it reads, does not depend on their digits. Formulas are
// complete. Hisil, Wong, Carter, Dawson, "Twisted Edwards curves revisited" (2008).

constexpr u32 READ = 24, MADE = 32, MULTIPLES = 8;   // a digit of four bits, less 8, is -8 to 7

struct Field {
    u32 w[8];
};

struct Point {
    Field x, y, z, t;
};

// A point that is added: y + x, y - x, 2 z, 2 d t.
struct Addend {
    Field sum, diff, z2, t2d;
};

DEVICE Field small(u32 value) { return Field{{value, 0, 0, 0, 0, 0, 0, 0}}; }
DEVICE Field curve_d() {
    return Field{{0x135978a3, 0x75eb4dca, 0x4141d8ab, 0x00700a4d, 0x7779e898, 0x8cc74079, 0x2b6ffe73, 0x52036cee}};
}
DEVICE Field twice_d() {
    return Field{{0x26b2f159, 0xebd69b94, 0x8283b156, 0x00e0149a, 0xeef3d130, 0x198e80f2, 0x56dffce7, 0x2406d9dc}};
}
DEVICE Field inverse_d() {
    return Field{{0xcdc9f843, 0x25e0f276, 0x4279542e, 0x0b5dd698, 0xcdb9cf66, 0x2b162114, 0x14d5ce43, 0x40907ed2}};
}

// r + over * 2^256, which is r + 38 * over modulo p. A carry out of it leaves r below 38 * over, so that the last
// addition makes none.
DEVICE void fold(Field& r, u32 over) {
    r.w[0] = add_cc(r.w[0], 38 * over);
#pragma unroll
    for (u32 k = 1; k < 8; ++k) r.w[k] = addc_cc(r.w[k], 0);
    r.w[0] += 38 * addc(0, 0);
}

DEVICE Field operator+(const Field& a, const Field& b) {
    Field r;
    r.w[0] = add_cc(a.w[0], b.w[0]);
#pragma unroll
    for (u32 k = 1; k < 8; ++k) r.w[k] = addc_cc(a.w[k], b.w[k]);
    fold(r, addc(0, 0));
    return r;
}

// a - b as a + ~b + 1 less 2^256, or less 38, where nothing was carried: again less 38 if that was below 0.
DEVICE Field operator-(const Field& a, const Field& b) {
    Field r;
    add_cc(1, 0xffffffffu);   // the one, as a carry
#pragma unroll
    for (u32 k = 0; k < 8; ++k) r.w[k] = addc_cc(a.w[k], ~b.w[k]);
    u32 borrowed = addc(0, 0) - 1;   // 0, or all ones
    r.w[0] = add_cc(r.w[0], (u32)-38 & borrowed);
#pragma unroll
    for (u32 k = 1; k < 8; ++k) r.w[k] = addc_cc(r.w[k], borrowed);
    r.w[0] -= 38 & borrowed & (addc(0, 0) - 1);
    return r;
}

// to[0 .. 7] += (from[0], from[2], from[4], from[6]) * factor. Returns the carry.
DEVICE u32 add_products(u32* to, const u32* from, u32 factor) {
    to[0] = mad_lo_cc(from[0], factor, to[0]);
    to[1] = madc_hi_cc(from[0], factor, to[1]);
#pragma unroll
    for (u32 k = 2; k < 8; k += 2) {
        to[k] = madc_lo_cc(from[k], factor, to[k]);
        to[k + 1] = madc_hi_cc(from[k], factor, to[k + 1]);
    }
    return addc(0, 0);
}

// Columns of the product in two sums, even and 2^32 odd, in which all products begin at an even place, as pairs of
// words do for the multiplier. Then the upper half 38 times onto the lower one: below 39 * 2^256.
DEVICE Field operator*(const Field& a, const Field& b) {
    u32 even[16] = {0}, odd[16] = {0};
#pragma unroll
    for (u32 i = 0; i < 8; i += 2) {
        even[i + 8] += add_products(even + i, a.w, b.w[i]);
        odd[i + 8] += add_products(odd + i, a.w + 1, b.w[i]);
        odd[i + 8] += add_products(odd + i, a.w, b.w[i + 1]);
        u32 carry = add_products(even + i + 2, a.w + 1, b.w[i + 1]);
        if (i < 6) even[(i + 10) % 16] += carry;   // none at last: 512 bits hold the product
    }
    even[1] = add_cc(even[1], odd[0]);
#pragma unroll
    for (u32 k = 2; k < 16; ++k) even[k] = addc_cc(even[k], odd[k - 1]);

    u32 upper[8] = {0};
    u32 over = add_products(even, even + 8, 38);
    add_products(upper, even + 9, 38);
    Field r;
    r.w[0] = even[0];
    r.w[1] = add_cc(even[1], upper[0]);
#pragma unroll
    for (u32 k = 2; k < 8; ++k) r.w[k] = addc_cc(even[k], upper[k - 1]);
    over += addc(upper[7], 0);
    fold(r, over);
    return r;
}

DEVICE Field squared(Field a, u32 times) {
#pragma unroll 1
    for (u32 i = 0; i < times; ++i) a = a * a;
    return a;
}

// a^(p - 2): 254 squarings and 11 products for every a.
DEVICE Field inverse(const Field& a) {
    Field two = a * a, nine = squared(two, 2) * a, eleven = nine * two;
    Field ones_5 = eleven * eleven * nine;   // a^(2^5 - 1)
    Field ones_10 = squared(ones_5, 5) * ones_5;
    Field ones_20 = squared(ones_10, 10) * ones_10;
    Field ones_50 = squared(squared(ones_20, 20) * ones_20, 10) * ones_10;
    Field ones_100 = squared(ones_50, 50) * ones_50;
    Field ones_250 = squared(squared(ones_100, 100) * ones_100, 50) * ones_50;
    return squared(ones_250, 5) * eleven;
}

// a, or b where the mask is all ones.
DEVICE void choose(Field& a, const Field& b, u32 mask) {
#pragma unroll
    for (u32 k = 0; k < 8; ++k) a.w[k] ^= (a.w[k] ^ b.w[k]) & mask;
}

// 2^255 is 19, and a value below 2^255 + 19 reaches p exactly if 19 more reach 2^255.
DEVICE Field canonical(Field a) {
    u32 top = a.w[7] >> 31;
    a.w[7] &= 0x7fffffffu;
    a.w[0] = add_cc(a.w[0], 19 * top);
#pragma unroll
    for (u32 k = 1; k < 7; ++k) a.w[k] = addc_cc(a.w[k], 0);
    a.w[7] = addc(a.w[7], 0);
    Field less;
    less.w[0] = add_cc(a.w[0], 19);
#pragma unroll
    for (u32 k = 1; k < 7; ++k) less.w[k] = addc_cc(a.w[k], 0);
    less.w[7] = addc(a.w[7], 0);
    u32 reaches = 0 - (less.w[7] >> 31);
    less.w[7] &= 0x7fffffffu;
    choose(a, less, reaches);
    return a;
}

// All bits that differ.
DEVICE u32 difference(const Field& a, const Field& b) {
    u32 bits = 0;
#pragma unroll
    for (u32 k = 0; k < 8; ++k) bits |= a.w[k] ^ b.w[k];
    return bits;
}

DEVICE Field load(const u32* row) {
    const uint4* from = reinterpret_cast<const uint4*>(row);
    uint4 low = from[0], high = from[1];
    return Field{{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

DEVICE void store(u32* row, const Field& a) {
    uint4* to = reinterpret_cast<uint4*>(row);
    to[0] = make_uint4(a.w[0], a.w[1], a.w[2], a.w[3]);
    to[1] = make_uint4(a.w[4], a.w[5], a.w[6], a.w[7]);
}

// A row of either form; one that was read becomes (2 x : 2 y : 2 : 2 x y).
DEVICE Point load_point(const u32* row, u32 words) {
    Field a = load(row), b = load(row + 8), c = load(row + 16);
    if (words == MADE) return Point{a, b, c, load(row + 24)};
    return Point{a - b, a + b, small(2), c * inverse_d()};
}

DEVICE void store_point(u32* row, const Point& p) {
    store(row, p.x);
    store(row + 8, p.y);
    store(row + 16, p.z);
    store(row + 24, p.t);
}

DEVICE Point neutral() { return Point{small(0), small(1), small(1), small(0)}; }

DEVICE Addend addend(const Point& p) { return Addend{p.y + p.x, p.y - p.x, p.z + p.z, p.t * twice_d()}; }

DEVICE Addend load_addend(const u32* row, u32 words) {
    if (words == READ) return Addend{load(row), load(row + 8), small(2), load(row + 16)};
    return addend(load_point(row, MADE));
}

// The negative where the mask is all ones.
DEVICE void negate(Addend& q, u32 mask) {
    Field sum = q.sum;
    choose(q.sum, q.diff, mask);
    choose(q.diff, sum, mask);
    choose(q.t2d, small(0) - q.t2d, mask);
}

// p + q; where the z of q is 1, without a product of z. In this order the fewest registers are live.
DEVICE Point add(const Point& p, const Addend& q, bool is_affine) {
    Field c = p.t * q.t2d, d = is_affine ? p.z + p.z : p.z * q.z2, f = d - c, g = d + c;
    Field a = (p.y - p.x) * q.diff, b = (p.y + p.x) * q.sum, e = b - a, h = b + a;
    return Point{e * f, g * h, f * g, e * h};
}

DEVICE Point doubled(const Point& p) {
    Field a = p.x * p.x, b = p.y * p.y, c = p.z * p.z, s = p.x + p.y;
    Field h = a + b, e = h - s * s, g = a - b, f = c + c + g;
    return Point{e * f, g * h, f * g, e * h};
}

// q = multiple of those below for a digit less 8: all are read, and one is kept.
template <class Entry>
DEVICE Addend pick(u32 digit, Entry entry) {
    u32 minus = 0 - (u32)(digit < 8), magnitude = ((digit - 8) ^ minus) - minus;
    Addend q = {small(1), small(1), small(2), small(0)};
#pragma unroll 1
    for (u32 d = 0; d < MULTIPLES; ++d) {
        u32 differs = magnitude ^ (d + 1), mask = 0 - ((differs - 1) >> 31);
        Addend found = entry(d);
        choose(q.sum, found.sum, mask);
        choose(q.diff, found.diff, mask);
        choose(q.z2, found.z2, mask);
        choose(q.t2d, found.t2d, mask);
    }
    negate(q, minus);
    return q;
}

DEVICE u32 digit_at(const u32* scalar, u32 place) { return scalar[place / 8] >> (4 * (place % 8)) & 15; }

// out: rows as read from raw rows of x and y, 16 words; *refused becomes 1 if one is not canonical or not on the curve.
KERNEL k_enter(u32* out, const u32* raw, u32* refused, u64 count) {
    u64 row = thread_index();
    if (row >= count) return;
    Field x = load(raw + row * 16), y = load(raw + row * 16 + 8), xx = x * x, yy = y * y, xy = x * y;
    Field zero = canonical(yy - xx - small(1) - xx * yy * curve_d());
    if (difference(x, canonical(x)) | difference(y, canonical(y)) | difference(zero, small(0))) *refused = 1;
    store(out + row * READ, y + x);
    store(out + row * READ + 8, y - x);
    store(out + row * READ + 16, xy * twice_d());
}

// raw = x and y of rows, 16 words. A thread takes every threads-th row, with one inversion for all of its z: products
// of those before wait where a row's result will be.
KERNEL k_leave(u32* raw, const u32* rows, u32 words, u64 threads, u64 count) {
    u64 first = thread_index();
    if (first >= threads) return;
    Field product = small(1);
    u64 row = first;
#pragma unroll 1
    for (; row < count; row += threads) {
        store(raw + row * 16, product);
        product = product * (words == MADE ? load(rows + row * words + 16) : small(2));
    }
    product = inverse(product);
#pragma unroll 1
    while (row > first) {
        row -= threads;
        Point p = load_point(rows + row * words, words);
        Field z = product * load(raw + row * 16);
        product = product * p.z;
        store(raw + row * 16, canonical(p.x * z));
        store(raw + row * 16 + 8, canonical(p.y * z));
    }
}

KERNEL k_add(u32* out, const u32* a, u32 a_words, const u32* b, u32 b_words, u64 count) {
    u64 row = thread_index();
    if (row >= count) return;
    Addend q = load_addend(b + row * b_words, b_words);
    store_point(out + row * MADE, add(load_point(a + row * a_words, a_words), q, false));
}

// out = 2^times rows, or the negative of that.
KERNEL k_double(u32* out, const u32* rows, u32 words, u32 times, u32 is_negative, u64 count) {
    u64 row = thread_index();
    if (row >= count) return;
    Point p = load_point(rows + row * words, words);
#pragma unroll 1
    for (u32 i = 0; i < times; ++i) p = doubled(p);
    u32 mask = 0 - is_negative;
    choose(p.x, small(0) - p.x, mask);
    choose(p.t, small(0) - p.t, mask);
    store_point(out + row * MADE, p);
}

// out[target[c]] = sum of rows[order[begin[c] + i]] for i < length[c]. order may be null: the positions themselves.
// Chunks come sorted by length, so that the threads of a warp end together.
template <u32 words>
DEVICE void sum_rows(u32* out, const u32* rows, const int* order, const long long* begin, const int* length,
                     const int* target, u64 chunks) {
    u64 chunk = thread_index();
    if (chunk >= chunks) return;
    u64 first = (u64)begin[chunk];
    int count = length[chunk];
    auto row_at = [&](int i) { return rows + (order ? (u64)order[first + i] : first + i) * words; };
    Point total = neutral();
    if (count > 0) total = load_point(row_at(0), words);
    const u32* next = count > 1 ? row_at(1) : rows;
#pragma unroll 1
    for (int i = 1; i < count; ++i) {
        Addend q = load_addend(next, words);
        if (i + 1 < count) {   // the sum takes longer than the fetch
            next = row_at(i + 1);
#pragma unroll
            for (u32 k = 0; k < words; k += 8) prefetch_sector(next + k);
        }
        total = add(total, q, words == READ);
    }
    store_point(out + (u64)target[chunk] * MADE, total);
}

KERNEL k_sum_read(u32* out, const u32* rows, const int* order, const long long* begin, const int* length,
                  const int* target, u64 chunks) {
    sum_rows<READ>(out, rows, order, begin, length, target, chunks);
}

KERNEL k_sum_made(u32* out, const u32* rows, const int* order, const long long* begin, const int* length,
                  const int* target, u64 chunks) {
    sum_rows<MADE>(out, rows, order, begin, length, target, chunks);
}

// out = scalar times the base of a table: table[j][d] = (d + 1) 16^j base, as read. Scalars come with 8 added to each of
// their `digits` digits.
KERNEL k_fixed(u32* out, const u32* table, const u32* scalars, u32 digits, u64 count) {
    u64 row = thread_index();
    if (row >= count) return;
    Point total = neutral();
#pragma unroll 1
    for (u32 j = 0; j < digits; ++j) {
        const u32* entries = table + j * MULTIPLES * READ;
        auto entry = [&](u32 d) { return load_addend(entries + d * READ, READ); };
        total = add(total, pick(digit_at(scalars + row * 8, j), entry), true);
    }
    store_point(out + row * MADE, total);
}

// out = scalar times row, scalars as in k_fixed with 64 digits; a step of 0 repeats one scalar. Multiples of a row wait
// in scratch[MULTIPLES * 4][count][8].
KERNEL k_mul(u32* out, const u32* rows, u32 words, const u32* scalars, u64 step, u32* scratch, u64 count) {
    u64 row = thread_index();
    if (row >= count) return;
    auto place = [&](u32 d, u32 part) { return scratch + ((u64)(4 * d + part) * count + row) * 8; };
    auto entry = [&](u32 d) { return Addend{load(place(d, 0)), load(place(d, 1)), load(place(d, 2)), load(place(d, 3))}; };
    Point p = load_point(rows + row * words, words);
#pragma unroll 1
    for (u32 d = 0; d < MULTIPLES; ++d) {
        Addend q = addend(p);
        store(place(d, 0), q.sum);
        store(place(d, 1), q.diff);
        store(place(d, 2), q.z2);
        store(place(d, 3), q.t2d);
        p = add(p, entry(0), false);
    }
    Point total = neutral();
#pragma unroll 1
    for (u32 j = 64; j-- > 0;) {
#pragma unroll 1
        for (u32 i = 0; i < 4; ++i) total = doubled(total);
        total = add(total, pick(digit_at(scalars + row * step * 8, j), entry), false);
    }
    store_point(out + row * MADE, total);
}
