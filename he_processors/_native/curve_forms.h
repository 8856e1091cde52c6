/* Points from bytes and to bytes, LANES at a time: affine coordinates, ristretto255, batch inversion. See
 * curve_points.h for what the including file defines.
 *
 * Reference: RFC 9496, section 4; Montgomery's simultaneous inversion (Math. Comp. 48, 1987, section 10.3.1). */
static const uint64_t SQRT_M1[4] = {0xC4EE1B274A0EA0B0, 0x2F431806AD2FE478, 0x2B4D00993DFBD7A7, 0x2B8324804FC1DF0B};
static const uint64_t SQRT_AD_MINUS_ONE[4] = {0x7E97F6A0497B2E1B, 0xAF9D8E0C1B7854BD, 0x0F3CFCC931F5D1FD,
                                              0x376931BF2B8348AC};
static const uint64_t INVSQRT_A_MINUS_D[4] = {0x99C8FDAA805D40EA, 0x9D2F16175A4172BE, 0x16C27B91FE01D840,
                                              0x786C8905CFAFFCA2};
static const uint64_t ONE_MINUS_D_SQUARE[4] = {0xE27C09C1945FC176, 0x2C81A138CD5E350F, 0x9994ABDDBE70DFE4,
                                               0x029072A8B2B3E0D7};
static const uint64_t D_MINUS_ONE_SQUARE[4] = {0x31AD5AAA44ED4D20, 0xD29E4A2CB01E1999, 0x4CDCD32F529B4EEB,
                                               0x5968B37AF66C2241};
#define GROUPS 256 /* in a block that shares one inversion */

INLINE fe minus(fe a, fe b)
{
    return tight(settle(diff(a, b)));
}

INLINE fe add(fe a, fe b)
{
    return tight(settle(sum(a, b)));
}

/* `words` words of bytes for each lane; lanes without a row get those of `spare`. */
INLINE void load_bytes(vec *w, const uint8_t *bytes, int words, size_t i, size_t n, const uint64_t *spare)
{
    uint64_t copy[LANES][8];
    const uint64_t *row[LANES];
    for (size_t l = 0; l < LANES; l++) { /* bytes may lie anywhere, words may not */
        memcpy(copy[l], i + l < n ? (const void *)(bytes + (i + l) * 8 * (size_t)words) : spare, 8 * (size_t)words);
        row[l] = copy[l];
    }
    load_words(w, row, words);
}

INLINE void store_bytes(const vec *w, uint8_t *bytes, int words, size_t i, size_t n)
{
    uint64_t copy[LANES][8], *row[LANES];
    for (size_t l = 0; l < LANES; l++)
        row[l] = copy[l];
    store_words(w, row, words);
    for (size_t l = 0; l < LANES && i + l < n; l++)
        memcpy(bytes + (i + l) * 8 * (size_t)words, copy[l], 8 * (size_t)words);
}

/* Whether four words are a number below p. */
INLINE mask is_canonical(const vec *w, fe value)
{
    vec again[4];
    to_words(value, again);
    return same_words(w, again);
}

static int from_affine(const uint8_t *bytes, size_t n, uint64_t *out)
{
    const uint64_t spare[8] = {0, 0, 0, 0, 1, 0, 0, 0};
    const fe one = constant(ONE), d = constant(D);
    unsigned refused = 0;
    for (size_t i = 0; i < n; i += LANES) {
        vec w[8];
        load_bytes(w, bytes, 8, i, n, spare);
        fe x = from_words(w), y = from_words(w + 4), xx = square(x), yy = square(y);
        mask good = both(is_canonical(w, x), is_canonical(w + 4, y));
        good = both(good, is_zero(minus(add(minus(xx, yy), one), negative(mul(mul(xx, yy), d)))));
        refused |= lanes_of(not(good));
        struct affine q = affine_of(x, y);
        store_affine(&q, out, i, n);
    }
    return refused ? 1 : 0;
}

/* One group of a normalised block: x and y are tight. */
INLINE void give_out(fe x, fe y, enum vc_form form, void *out, uint8_t *odd, size_t i, size_t n)
{
    if (form == VC_TO_AFFINE) {
        struct affine q = affine_of(x, y);
        store_affine(&q, out, i, n);
        return;
    }
    vec w[8];
    to_words(x, w);
    to_words(y, w + 4);
    if (form == VC_TO_BYTES) {
        store_bytes(w, out, 8, i, n);
        return;
    }
    uint64_t low_x[LANES], low_y[LANES];
    memcpy(low_x, &w[0], sizeof low_x);
    memcpy(low_y, &w[4], sizeof low_y);
    for (size_t l = 0; l < LANES && i + l < n; l++) {
        odd[i + l] = low_x[l] & 1;
        ((uint64_t *)out)[i + l] = low_y[l];
    }
}

static int normalise(struct vc_rows p, size_t n, enum vc_form form, void *out, uint8_t *odd)
{
    fe *before = allocate(GROUPS * sizeof(fe)); /* products of all z before each group's */
    if (!before)
        return -1;
    for (size_t start = 0; start < n; start += GROUPS * LANES) {
        size_t stop = n - start < GROUPS * LANES ? n : start + GROUPS * LANES;
        fe product = constant(ONE);
        for (size_t i = start; i < stop; i += LANES) {
            before[(i - start) / LANES] = product;
            product = mul(product, load_any(p, i, stop).z);
        }
        fe inverted = inverse(product); /* of all z up to the group that comes next, from the last one down */
        for (size_t group = (stop - start + LANES - 1) / LANES; group-- > 0;) {
            struct point q = load_any(p, start + group * LANES, stop);
            fe z = mul(inverted, before[group]);
            inverted = mul(inverted, q.z);
            give_out(mul(q.x, z), mul(q.y, z), form, out, odd, start + group * LANES, stop);
        }
    }
    free(before);
    return 0;
}

INLINE mask is_negative(fe a)
{
    vec w[4];
    uint64_t low[LANES];
    unsigned bits = 0;
    to_words(a, w);
    memcpy(low, &w[0], sizeof low);
    for (unsigned l = 0; l < LANES; l++)
        bits |= (unsigned)(low[l] & 1) << l;
    return of_lanes(bits);
}

INLINE fe magnitude(fe a)
{
    return choose(is_negative(a), negative(a), a);
}

/* The non-negative root of u / v, or of sqrt(-1) u / v, and in which lanes it is the former (RFC 9496, 4.2). */
static fe root_of_ratio(fe u, fe v, mask *was_square)
{
    fe i = constant(SQRT_M1), v3 = mul(square(v), v), v7 = mul(square(v3), v);
    fe r = mul(mul(u, v3), root_power(mul(u, v7))), check = mul(v, square(r)), opposite = negative(u);
    mask correct = is_zero(minus(check, u)), flipped = is_zero(minus(check, opposite));
    mask flipped_i = is_zero(minus(check, mul(opposite, i)));
    *was_square = not(both(not(correct), not(flipped)));
    return magnitude(choose(both(not(flipped), not(flipped_i)), r, mul(r, i)));
}

/* Points by y and the lowest bit of x (RFC 8032, 5.1.3): x^2 = (y^2 - 1) / (d y^2 + 1). */
static int from_compressed(const uint8_t *bytes, size_t n, uint64_t *out)
{
    const uint64_t top = (uint64_t)1 << 63;
    const fe one = constant(ONE), d = constant(D);
    unsigned refused = 0;
    for (size_t i = 0; i < n; i += LANES) {
        uint64_t copy[LANES][4];
        const uint64_t *row[LANES];
        unsigned odd = 0;
        for (size_t l = 0; l < LANES; l++) {
            memcpy(copy[l], i + l < n ? (const void *)(bytes + (i + l) * 32) : (const void *)ONE, 32);
            odd |= (unsigned)(copy[l][3] >> 63) << l;
            copy[l][3] &= ~top;
            row[l] = copy[l];
        }
        vec w[4];
        load_words(w, row, 4);
        fe y = from_words(w), yy = square(y);
        mask was_square;
        fe x = root_of_ratio(minus(yy, one), add(mul(yy, d), one), &was_square);
        mask good = both(both(is_canonical(w, y), was_square), not(both(is_zero(x), of_lanes(odd))));
        refused |= lanes_of(not(good));
        struct affine q = affine_of(choose(of_lanes(odd), negative(x), x), y);
        store_affine(&q, out, i, n);
    }
    return refused ? 1 : 0;
}

static int from_ristretto(const uint8_t *bytes, size_t n, uint64_t *out)
{
    const uint64_t spare[4] = {0, 0, 0, 0}; /* the neutral element */
    const fe one = constant(ONE), d = constant(D);
    unsigned refused = 0;
    for (size_t i = 0; i < n; i += LANES) {
        vec w[4];
        load_bytes(w, bytes, 4, i, n, spare);
        fe s = from_words(w), ss = square(s), u1 = minus(one, ss), u2 = add(one, ss), u2u2 = square(u2);
        fe v = minus(negative(mul(d, square(u1))), u2u2);
        mask was_square;
        fe root = root_of_ratio(one, mul(v, u2u2), &was_square), den_x = mul(root, u2);
        fe den_y = mul(mul(root, den_x), v), x = magnitude(mul(add(s, s), den_x)), y = mul(u1, den_y);
        mask good = both(both(is_canonical(w, s), not(is_negative(s))), was_square);
        good = both(good, both(not(is_negative(mul(x, y))), not(is_zero(y))));
        refused |= lanes_of(not(good));
        struct affine q = affine_of(x, y);
        store_affine(&q, out, i, n);
    }
    return refused ? 1 : 0;
}

static int to_ristretto(struct vc_rows points, size_t n, uint8_t *bytes)
{
    const fe i_root = constant(SQRT_M1);
    for (size_t i = 0; i < n; i += LANES) {
        struct point p = load_any(points, i, n);
        fe u1 = mul(add(p.z, p.y), minus(p.z, p.y)), u2 = mul(p.x, p.y);
        mask unused;
        fe root = root_of_ratio(constant(ONE), mul(u1, square(u2)), &unused);
        fe den1 = mul(root, u1), den2 = mul(root, u2), z_inverse = mul(mul(den1, den2), p.t);
        mask rotate = is_negative(mul(p.t, z_inverse));
        fe x = choose(rotate, mul(p.y, i_root), p.x), y = choose(rotate, mul(p.x, i_root), p.y);
        fe den = choose(rotate, mul(den1, constant(INVSQRT_A_MINUS_D)), den2);
        y = choose(is_negative(mul(x, z_inverse)), negative(y), y);
        vec w[4];
        to_words(magnitude(mul(den, minus(p.z, y))), w);
        store_bytes(w, bytes, 4, i, n);
    }
    return 0;
}

/* A field element to a point (RFC 9496, 4.3.4, MAP). */
static struct point map_to_curve(fe t)
{
    const fe one = constant(ONE), d = constant(D), minus_one = negative(one);
    fe r = mul(constant(SQRT_M1), square(t)), u = mul(add(r, one), constant(ONE_MINUS_D_SQUARE));
    fe v = mul(minus(minus_one, mul(r, d)), add(r, d));
    mask was_square;
    fe s = root_of_ratio(u, v, &was_square);
    s = choose(was_square, s, negative(magnitude(mul(s, t))));
    fe c = choose(was_square, minus_one, r);
    fe m = minus(mul(mul(c, minus(r, one)), constant(D_MINUS_ONE_SQUARE)), v), ss = square(s);
    fe w0 = mul(add(s, s), v), w1 = mul(m, constant(SQRT_AD_MINUS_ONE)), w2 = minus(one, ss), w3 = add(one, ss);
    return (struct point){mul(w0, w3), mul(w2, w1), mul(w1, w3), mul(w0, w2)};
}

static int from_uniform(const uint8_t *bytes, size_t n, uint64_t *out)
{
    const uint64_t spare[8] = {0};
    for (size_t i = 0; i < n; i += LANES) {
        vec w[8];
        load_bytes(w, bytes, 8, i, n, spare);
        struct point a = map_to_curve(from_words(w)), b = map_to_curve(from_words(w + 4));
        struct cached q = cache(&b);
        a = add_cached(&a, &q);
        store_point(&a, out, i, n);
    }
    return 0;
}
