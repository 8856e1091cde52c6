/* The kernels of one type of codes: the including file defines CODE, its type, and NAME, that of the table. */
#define AHEAD 16 /* rows that are fetched before their turn, where these do not follow each other */

static void CODES(bin)(const struct vg_layout *layout, const float *values, size_t n_rows, const uint32_t *missing,
                       void *out, uint8_t *lacks, uint8_t *fills)
{
    CODE *codes = out;
    size_t n_features = layout->n_features;
    for (size_t f = 0; f < n_features; f++) {
        const float *upper = layout->upper + layout->starts[f];
        size_t n_bins = (size_t)(layout->starts[f + 1] - layout->starts[f]);
        uint8_t lacks_any = 0, fills_any = 0;
        for (size_t i = 0; i < n_rows; i++) {
            float value = values[i * n_features + f];
            int is_missing = value != value;
            size_t found = bin_of(upper, n_bins, value, layout->is_categorical[f]);
            lacks_any |= is_missing;
            fills_any |= !is_missing && found == missing[f];
            codes[i * n_features + f] = (CODE)(is_missing ? missing[f] : found);
        }
        lacks[f] = lacks_any;
        fills[f] = fills_any;
    }
}

/* Add each row's pair to the slots of its features from first to last - 1: that of a code is offsets[f] + code. Where
 * these offsets lie `stride` apart, they are not looked up. */
static void CODES(add)(const struct vg_table *table, const vg_pair *pairs, const int32_t *order,
                       const struct vg_span *span, const int64_t *offsets, size_t stride, size_t first, size_t last,
                       vg_pair *slots)
{
    const CODE *codes = table->codes;
    size_t n_features = table->n_features, begin = (size_t)span->begin, end = (size_t)span->end;
    for (size_t i = begin; i < end; i++) {
        size_t row = order ? (size_t)order[i] : i, f = first;
        const CODE *code = codes + row * n_features;
        vg_pair pair = pairs[row];
        if (order) {
            size_t later = (size_t)order[i + AHEAD < end ? i + AHEAD : end - 1];
            __builtin_prefetch(pairs + later);
            __builtin_prefetch(codes + later * n_features + first);
            __builtin_prefetch(codes + later * n_features + last - 1);
        }
        if (stride) {
            vg_pair *at = slots + offsets[f], *second = at + stride, *third = second + stride, *fourth = third + stride;
            for (; f + 4 <= last; f += 4, at += 4 * stride, second += 4 * stride) {
                at[code[f]] += pair;
                second[code[f + 1]] += pair;
                third[code[f + 2]] += pair;
                fourth[code[f + 3]] += pair;
                third += 4 * stride;
                fourth += 4 * stride;
            }
        } else {
            for (; f + 4 <= last; f += 4) {
                slots[offsets[f] + code[f]] += pair;
                slots[offsets[f + 1] + code[f + 1]] += pair;
                slots[offsets[f + 2] + code[f + 2]] += pair;
                slots[offsets[f + 3] + code[f + 3]] += pair;
            }
        }
        for (; f < last; f++)
            slots[offsets[f] + code[f]] += pair;
    }
}

static inline int CODES(goes_left)(CODE code, uint32_t missing, int64_t bin, int default_left, const uint8_t *mask)
{
    int is_left = mask ? !mask[code == missing ? 0 : code] : code <= bin;
    return code == missing ? default_left : is_left;
}

/* Rows that go left stay in order, before those that go right; returns how many go left. */
static int64_t CODES(divide)(const void *columns, size_t n_rows, uint32_t missing, const uint8_t *masks,
                             const struct vg_division *division, int32_t *order, int32_t *scratch)
{
    const CODE *codes = (const CODE *)columns + (size_t)division->feature * n_rows;
    const uint8_t *mask = division->mask < 0 ? NULL : masks + division->mask;
    size_t n_left = 0, n = (size_t)(division->end - division->begin);
    int64_t bin = division->bin;
    int default_left = division->default_left != 0;
    int32_t *rows = order + division->begin, *right = scratch + division->begin;
    if (mask)
        for (size_t i = 0; i < n; i++) {
            int32_t row = rows[i];
            int left = CODES(goes_left)(codes[row], missing, bin, default_left, mask);
            rows[n_left] = row;
            right[i - n_left] = row;
            n_left += (size_t)left;
        }
    else
        for (size_t i = 0; i < n; i++) {
            int32_t row = rows[i];
            CODE code = codes[row];
            int left = ((code <= bin) & (code != missing)) | ((code == missing) & default_left);
            rows[n_left] = row;
            right[i - n_left] = row;
            n_left += (size_t)left;
        }
    memcpy(rows + n_left, right, (n - n_left) * sizeof(int32_t));
    return (int64_t)n_left;
}

static void CODES(descend)(const struct vg_table *table, const uint8_t *masks, const struct vg_node *nodes,
                           int32_t *leaves)
{
    const CODE *codes = table->codes;
    for (size_t i = 0; i < table->n_rows; i++, codes += table->n_features) {
        int64_t at = 0;
        while (nodes[at].left >= 0) {
            const struct vg_node *node = &nodes[at];
            const uint8_t *mask = node->mask < 0 ? NULL : masks + node->mask;
            int left = CODES(goes_left)(codes[node->feature], table->missing[node->feature], node->bin,
                                        node->default_left != 0, mask);
            at = left ? node->left : node->right;
        }
        leaves[i] = (int32_t)at;
    }
}

const struct vg_codes NAME = {sizeof(CODE), CODES(bin), CODES(add), CODES(divide), CODES(descend)};

#undef AHEAD
#undef CODE
#undef NAME
#undef CODES
