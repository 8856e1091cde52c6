// Montgomery multiplication of numbers of LIMBS 32-bit words, each held by a group of TPI lanes of one warp.
//
// Lane l of a group holds words l * L .. l * L + L - 1 in registers (L = LIMBS / TPI). R = 2^(32 * LIMBS).
// Numbers in flight are any representative in [0, R), not only [0, n), so that a modulus may use every bit of R;
// the result of a product a * b / R mod n is below R + n, and n is taken off only when R is reached. `canonical`
// takes the last step to [0, n).
// Montgomery, "Modular multiplication without trial division" (1985); word-wise scanning as in Koc, Acar, Kaliski,
// "Analyzing and comparing Montgomery multiplication algorithms" (1996), CIOS, spread over lanes.

static_assert(TPI >= 2 && TPI <= 32 && (TPI & (TPI - 1)) == 0, "TPI must be a power of two within a warp");
static_assert(LIMBS % (4 * TPI) == 0, "a lane moves whole 16-byte pieces");

constexpr u32 L = LIMBS / TPI;

struct Modulus {
    u32 n[L];      // this lane's words
    u32 n_prime;   // -n^-1 mod 2^32
    u32 lane;      // place in the group
    u32 base;      // place of the group's first lane in the warp
};

DEVICE void load(u32 (&r)[L], const u32* row, u32 lane) {
    const uint4* from = reinterpret_cast<const uint4*>(row + lane * L);
#pragma unroll
    for (u32 k = 0; k < L / 4; ++k) {
        uint4 piece = from[k];
        r[4 * k] = piece.x;
        r[4 * k + 1] = piece.y;
        r[4 * k + 2] = piece.z;
        r[4 * k + 3] = piece.w;
    }
}

DEVICE void store(u32* row, const u32 (&r)[L], u32 lane) {
    uint4* to = reinterpret_cast<uint4*>(row + lane * L);
#pragma unroll
    for (u32 k = 0; k < L / 4; ++k) to[k] = make_uint4(r[4 * k], r[4 * k + 1], r[4 * k + 2], r[4 * k + 3]);
}

// Ask for this lane's words ahead of their use. A sector of memory is 8 words.
DEVICE void prefetch(const u32* row, u32 lane) {
#pragma unroll
    for (u32 k = 0; k < L; k += 8) prefetch_sector(row + lane * L + k);
}

DEVICE Modulus load_modulus(const u32* n, u32 n_prime) {
    Modulus m;
    u32 place = (u32)(thread_index() % 32);
    m.lane = place % TPI;
    m.base = place - m.lane;
    m.n_prime = n_prime;
    load(m.n, n, m.lane);
    return m;
}

// Group-wide view of one bit per lane.
DEVICE u32 group_bits(u32 warp_bits, const Modulus& m) {
    return TPI == 32 ? warp_bits : (warp_bits >> m.base) & ((1u << (TPI % 32)) - 1);
}

// Hand each lane's carry bit to the next lane and on through lanes of all ones. Returns the carry out of the group.
// Lanes that made a carry do not hold all ones, so adding the two bit sets ripples exactly as the carries do.
DEVICE u32 settle_carries(u32 (&r)[L], u32 carry, const Modulus& m) {
    u32 made = votes(carry != 0);
    if (made == 0) return 0;   // the same for the whole warp
    u32 ones = r[0];
#pragma unroll
    for (u32 k = 1; k < L; ++k) ones &= r[k];
    u64 passing = group_bits(votes(ones == 0xffffffffu), m);
    u64 sum = ((u64)group_bits(made, m) << 1) + passing;
    u32 incoming = (u32)((sum ^ passing) >> m.lane) & 1;
    r[0] = add_cc(r[0], incoming);
#pragma unroll
    for (u32 k = 1; k < L; ++k) r[k] = addc_cc(r[k], 0);
    return (u32)(sum >> TPI) & 1;
}

// r - n modulo R, as r + ~n + 1. Returns 1 if r >= n. With mask 0 instead of all ones: r, 0.
DEVICE u32 subtract_modulus(u32 (&r)[L], u32 mask, const Modulus& m) {
    add_cc(m.lane == 0 ? mask : 0, 0xffffffffu);   // the one, as a carry into the first word
#pragma unroll
    for (u32 k = 0; k < L; ++k) r[k] = addc_cc(r[k], ~m.n[k] & mask);
    u32 carry = addc(0, 0);
    return settle_carries(r, carry, m);
}

// r + extra * R less n, if that is not negative: the representative in [0, n) if it was below 2n.
DEVICE void canonical(u32 (&r)[L], u32 extra, const Modulus& m) {
    u32 less[L];
#pragma unroll
    for (u32 k = 0; k < L; ++k) less[k] = r[k];
    bool keep_less = (subtract_modulus(less, 0xffffffffu, m) | extra) != 0;
#pragma unroll
    for (u32 k = 0; k < L; ++k) r[k] = keep_less ? less[k] : r[k];
}

// a + b. Returns the carry out of the group.
DEVICE u32 add(u32 (&r)[L], const u32 (&b)[L], const Modulus& m) {
    r[0] = add_cc(r[0], b[0]);
#pragma unroll
    for (u32 k = 1; k < L; ++k) r[k] = addc_cc(r[k], b[k]);
    u32 carry = addc(0, 0);
    return settle_carries(r, carry, m);
}

// One lane's part of the running sum, in the frame of the current word:
//     low + sum even[k] 2^(32 k) + sum odd[k] 2^(32 (k + 1))
// Pairs of words are 64-bit registers to the multiplier: even[2j], even[2j+1] take the products of the lane's even
// words, odd[2j], odd[2j+1] those of its odd words, so that no product ever needs shifting.
struct Accumulator {
    u32 even[L];
    u32 odd[L];
    u32 low;
};

// acc += x * word over the even columns; the carry belongs to column L.
DEVICE u32 add_even_products(Accumulator& acc, const u32 (&x)[L], u32 word, u32 column_l) {
    acc.even[0] = mad_lo_cc(x[0], word, acc.even[0]);
    acc.even[1] = madc_hi_cc(x[0], word, acc.even[1]);
#pragma unroll
    for (u32 k = 2; k < L; k += 2) {
        acc.even[k] = madc_lo_cc(x[k], word, acc.even[k]);
        acc.even[k + 1] = madc_hi_cc(x[k], word, acc.even[k + 1]);
    }
    return addc(column_l, 0);
}

// acc = (acc + a * word + q * n) / 2^32 with q chosen so that the group's lowest word vanishes. A lane's sum stays
// below 4 * 2^(32 L), because a lane's own carries come back to it as the frame moves down.
DEVICE void step(Accumulator& acc, const u32 (&a)[L], u32 word, const Modulus& m) {
    // The word left over from the last frame enters column 0; its carry enters column 1, where the odd chain starts.
    acc.even[0] = add_cc(acc.even[0], acc.low);
#pragma unroll
    for (u32 k = 0; k < L; k += 2) {
        acc.odd[k] = madc_lo_cc(a[k + 1], word, acc.odd[k]);
        acc.odd[k + 1] = madc_hi_cc(a[k + 1], word, acc.odd[k + 1]);
    }
    u32 column_l1 = addc(0, 0);
    u32 column_l = add_even_products(acc, a, word, 0);

    u32 q = shuffle(acc.even[0] * m.n_prime, 0);
    column_l = add_even_products(acc, m.n, q, column_l);
    acc.odd[0] = mad_lo_cc(m.n[1], q, acc.odd[0]);
    acc.odd[1] = madc_hi_cc(m.n[1], q, acc.odd[1]);
#pragma unroll
    for (u32 k = 2; k < L; k += 2) {
        acc.odd[k] = madc_lo_cc(m.n[k + 1], q, acc.odd[k]);
        acc.odd[k + 1] = madc_hi_cc(m.n[k + 1], q, acc.odd[k + 1]);
    }
    column_l1 = addc(column_l1, 0);

    // Move the frame down one word: each lane's lowest word goes to the lane below. The first lane's is zero by the
    // choice of q, so the last lane may take that one without a special case.
    column_l = add_cc(column_l, shuffle(acc.even[0], m.lane + 1));
    column_l1 = addc(column_l1, 0);
    acc.low = acc.even[1];
#pragma unroll
    for (u32 k = 0; k < L; ++k) {
        u32 down = k + 2 < L ? acc.even[(k + 2) % L] : (k + 2 == L ? column_l : column_l1);
        acc.even[k] = acc.odd[k];
        acc.odd[k] = down;
    }
}

// r = a * b / R mod n, in [0, R), for a, b in [0, R); below 2n if b < n. r may be a or b.
DEVICE void multiply(u32 (&r)[L], const u32 (&a)[L], const u32 (&b)[L], const Modulus& m) {
    Accumulator acc;
    acc.low = 0;
#pragma unroll
    for (u32 k = 0; k < L; ++k) acc.even[k] = acc.odd[k] = 0;
#pragma unroll 1
    for (u32 from = 0; from < TPI; ++from) {
#pragma unroll
        for (u32 k = 0; k < L; ++k) step(acc, a, shuffle(b[k], from), m);
    }
    r[0] = add_cc(acc.even[0], acc.low);
#pragma unroll
    for (u32 k = 1; k < L; ++k) r[k] = addc_cc(acc.even[k], acc.odd[k - 1]);
    u32 over = addc(acc.odd[L - 1], 0);

    u32 from_below = shuffle(over, m.lane + TPI - 1);
    r[0] = add_cc(r[0], m.lane == 0 ? 0 : from_below);
#pragma unroll
    for (u32 k = 1; k < L; ++k) r[k] = addc_cc(r[k], 0);
    u32 carry = addc(0, 0);
    carry += m.lane == TPI - 1 ? over : 0;
    u32 reached_r = settle_carries(r, carry, m);
    if (votes(reached_r != 0)) subtract_modulus(r, reached_r ? 0xffffffffu : 0, m);
}
