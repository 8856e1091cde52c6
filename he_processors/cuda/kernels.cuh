// The kernels. One group of TPI lanes works on one number; rows are uint32[count][LIMBS], little-endian words.
//
// Lanes of a warp stay together: a group without work repeats the last row and stores nothing. All moduli are odd,
// all rows but those named "raw" are in Montgomery form: x * R mod n, any representative below R, and below 2n where
// R > 4n. None of this runs in constant time: memory addresses follow exponents.

DEVICE u64 my_row() { return thread_index() / TPI; }
DEVICE u64 at_most(u64 row, u64 count) { return row < count ? row : count - 1; }

// out[i] = a[i] * b[i * b_step]; a step of 0 repeats one row.
KERNEL k_mul(u32* out, const u32* a, const u32* b, u64 b_step, u64 count, const u32* n, u32 n_prime) {
    Modulus m = load_modulus(n, n_prime);
    u64 row = at_most(my_row(), count);
    u32 x[L], y[L];
    load(x, a + row * LIMBS, m.lane);
    load(y, b + row * b_step * LIMBS, m.lane);
    multiply(x, x, y, m);
    if (my_row() < count) store(out + row * LIMBS, x, m.lane);
}

// out = raw rows in Montgomery form; *too_large becomes 1 if any raw row is not below n.
KERNEL k_enter(u32* out, const u32* raw, const u32* r_squared, u32* too_large, u64 count, const u32* n, u32 n_prime) {
    Modulus m = load_modulus(n, n_prime);
    u64 row = at_most(my_row(), count);
    u32 x[L], y[L];
    load(x, raw + row * LIMBS, m.lane);
#pragma unroll
    for (u32 k = 0; k < L; ++k) y[k] = x[k];
    u32 reaches_n = subtract_modulus(y, 0xffffffffu, m);
    if (reaches_n && m.lane == 0) *too_large = 1;
    load(y, r_squared, m.lane);
    multiply(x, x, y, m);
    if (my_row() < count) store(out + row * LIMBS, x, m.lane);
}

// raw = rows out of Montgomery form, canonical.
KERNEL k_leave(u32* raw, const u32* rows, u64 count, const u32* n, u32 n_prime) {
    Modulus m = load_modulus(n, n_prime);
    u64 row = at_most(my_row(), count);
    u32 x[L], raw_one[L];
    load(x, rows + row * LIMBS, m.lane);
#pragma unroll
    for (u32 k = 0; k < L; ++k) raw_one[k] = m.lane == 0 && k == 0;
    multiply(x, x, raw_one, m);   // at most n
    canonical(x, 0, m);
    if (my_row() < count) store(raw + row * LIMBS, x, m.lane);
}

// out[i] = a[i] + b[i * b_step].
KERNEL k_add(u32* out, const u32* a, const u32* b, u64 b_step, u64 count, const u32* n, u32 n_prime) {
    Modulus m = load_modulus(n, n_prime);
    u64 row = at_most(my_row(), count);
    u32 x[L], y[L];
    load(x, a + row * LIMBS, m.lane);
    load(y, b + row * b_step * LIMBS, m.lane);
    // A representative is below R <= 4n, or, where R > 4n, below 2n.
    for (u32 i = 0; i < 3; ++i) {
        canonical(x, 0, m);
        canonical(y, 0, m);
    }
    u32 carry = add(x, y, m);
    canonical(x, carry, m);
    if (my_row() < count) store(out + row * LIMBS, x, m.lane);
}

// out[target[c]] = product of rows[order[begin[c] + i]] for i < length[c]; an empty product is one[]. order may be
// null: the positions themselves. Chunks come sorted by length, so that the groups of a warp end together.
KERNEL k_segprod(u32* out, const u32* rows, const int* order, const long long* begin, const int* length,
                 const int* target, u64 chunks, const u32* one, const u32* n, u32 n_prime) {
    Modulus m = load_modulus(n, n_prime);
    u64 chunk = at_most(my_row(), chunks);
    u64 first = (u64)begin[chunk];
    int count = length[chunk];
    auto row_at = [&](int i) -> const u32* {
        if (i >= count) return one;
        return rows + (order ? (u64)order[first + i] : first + i) * LIMBS;
    };
    u32 product[L], factor[L];
    load(product, row_at(0), m.lane);
    const u32* next = row_at(1);
    for (int i = 1; votes(i < count); ++i) {
        load(factor, next, m.lane);
        next = row_at(i + 1);
        prefetch(next, m.lane);   // the product takes longer than the fetch
        multiply(product, product, factor, m);
    }
    if (my_row() < chunks) store(out + (u64)target[chunk] * LIMBS, product, m.lane);
}

// out[i] = base^exponent[i] by one product per window: table[w][d] = base^(d * 2^(width * w)).
// exponents: uint32[count][words].
KERNEL k_fixedbase(u32* out, const u32* table, const u32* exponents, u32 words, u32 width, u32 windows, u64 count,
                   const u32* n, u32 n_prime) {
    Modulus m = load_modulus(n, n_prime);
    u64 row = at_most(my_row(), count);
    const u32* exponent = exponents + row * words;
    auto entry = [&](u32 window) -> const u32* {
        u32 bit = window * width;
        u64 two_words = exponent[bit / 32];
        if (bit / 32 + 1 < words) two_words |= (u64)exponent[bit / 32 + 1] << 32;
        u32 digit = (u32)(two_words >> (bit % 32)) & ((1u << width) - 1);
        return table + (((u64)window << width) + digit) * LIMBS;
    };
    u32 power[L], factor[L];
    load(power, entry(0), m.lane);
    for (u32 window = 1; window < windows; ++window) {
        load(factor, entry(window), m.lane);
        multiply(power, power, factor, m);
    }
    if (my_row() < count) store(out + row * LIMBS, power, m.lane);
}

// The same program for every row, on one running number that starts as the row, and `slots` saved numbers in
// scratch[count][slots][LIMBS]. Codes: 0 square; else kind + slot, kind 1 << 16 multiply by, 2 << 16 save to,
// 3 << 16 take from.
KERNEL k_power(u32* out, const u32* rows, const int* program, u32 steps, u32* scratch, u32 slots, u64 count,
               const u32* n, u32 n_prime) {
    Modulus m = load_modulus(n, n_prime);
    u64 row = at_most(my_row(), count);
    u32* saved = scratch + my_row() * slots * LIMBS;   // idle groups have their own place too
    u32 number[L], factor[L];
    load(number, rows + row * LIMBS, m.lane);
    for (u32 i = 0; i < steps; ++i) {
        int kind = program[i] >> 16;
        u32* slot = saved + (u64)(program[i] & 0xffff) * LIMBS;
        if (kind == 2) {
            store(slot, number, m.lane);
        } else if (kind == 3) {
            load(number, slot, m.lane);
        } else {
#pragma unroll
            for (u32 k = 0; k < L; ++k) factor[k] = number[k];
            if (kind == 1) load(factor, slot, m.lane);
            multiply(number, number, factor, m);
        }
    }
    if (my_row() < count) store(out + row * LIMBS, number, m.lane);
}

// out[g] = product over j < size of rows[g * size + j]^(2^(shift * j)); rows past count are one[].
KERNEL k_horner(u32* out, const u32* rows, u64 count, u32 size, u32 shift, u64 groups, const u32* one, const u32* n,
                u32 n_prime) {
    Modulus m = load_modulus(n, n_prime);
    u64 group = at_most(my_row(), groups);
    u32 packed[L], factor[L];
    load(packed, one, m.lane);
    for (u32 j = size; j-- > 0;) {
        u64 row = group * size + j;
        const u32* next = row < count ? rows + row * LIMBS : one;
        for (u32 i = j + 1 == size ? shift : 0; i <= shift; ++i) {   // shift squarings, then the row; none at first
#pragma unroll
            for (u32 k = 0; k < L; ++k) factor[k] = packed[k];
            if (i == shift) load(factor, next, m.lane);
            multiply(packed, packed, factor, m);
        }
    }
    if (my_row() < groups) store(out + group * LIMBS, packed, m.lane);
}
