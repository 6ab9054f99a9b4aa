/* Attention over the cache of keys and values, with rotary embedding.
 *
 * Order of sums: a score is one sum per lane over the parts of a head, then `lane_sum`; the exponentials of a row are summed
 * per lane in the order of positions, then `lane_sum`; values are summed in the order of positions. So a token has the same
 * bits alone and in a run of tokens. */
#include "attention.h"
#include "norm.h"

/* Less than any score. */
#define LOWEST (-3e38f)
/* Of the sizes of heads whose sums are in registers. */
#define MOST_PARTS 8
/* Keys are fetched as many positions before they are read. */
#define POSITIONS_AHEAD 8

/* Rotary embedding of one head (Su et al. 2021), normalized before if the model does so: `size` numbers. */
INLINE void rotate(const attention_shape *shape, const int size, const float *states, const float *rotary,
                   const float *weight, float *rotated)
{
    const int half = size / 2;
    if (shape->qk_norm) {
        floats scale = all(reciprocal_rms(states, size, shape->eps));
        for (int i = 0; i < size; i += LANES)
            store(rotated + i, mul(mul(load(states + i), scale), load(weight + i)));
        states = rotated;
    }
    for (int i = 0; i < half; i += LANES) {
        floats low = load(states + i), high = load(states + half + i);
        floats low_turned = mul(low, load(rotary + i)), high_turned = mul(high, load(rotary + half + i));
        store(rotated + i, mul_add(high, load(rotary + size + i), low_turned));
        store(rotated + half + i, mul_add(low, load(rotary + size + half + i), high_turned));
    }
}

EXPORT void NAME(store_key_value)(const attention_shape *shape, const attention_head *at)
{
    const int size = (int)shape->head_size;
    const int64_t index = at->position * size;
    const float *key = at->qkv + (shape->query_heads + at->head) * size;
    const float *value = key + shape->kv_heads * size;
    float rotated[MOST_HEAD_SIZE];
    rotate(shape, size, key, at->rotary, at->key_norm, rotated);
    for (int i = 0; i < size; i += LANES) {
        store_items(at->keys, index + i, load(rotated + i), (int)shape->bf16);
        store_items(at->values, index + i, load(value + i), (int)shape->bf16);
    }
}

/* Keys and values of a head are too few for the core to fetch them ahead by itself. */
INLINE void fetch(const void *items, int64_t first, int count, int bf16)
{
    const int bytes = bf16 ? 2 : 4;
    UNROLL for (int i = 0; i < count * bytes; i += 64)
        __builtin_prefetch((const char *)items + first * bytes + i);
}

/* Scores of all keys that any of the rows sees; each row stores them from its own `first` on. */
INLINE void score(const int bf16, const int size, const int count, const attention_head *rows)
{
    floats queries[MOST_RUN_ROWS][MOST_PARTS];
    UNROLL for (int row = 0; row < count; row++)
    {
        UNROLL for (int i = 0; i < size / LANES; i++) queries[row][i] = load(rows[row].query + i * LANES);
    }
    for (int64_t position = rows[0].first; position <= rows[count - 1].position; position++) {
        floats products[MOST_RUN_ROWS];
        fetch(rows[0].keys, (position + POSITIONS_AHEAD) * size, size, bf16);
        fetch(rows[0].values, position * size, size, bf16);
        UNROLL for (int row = 0; row < count; row++) products[row] = all(0);
        UNROLL for (int i = 0; i < size / LANES; i++)
        {
            floats key = load_items(rows[0].keys, position * size + i * LANES, bf16);
            UNROLL for (int row = 0; row < count; row++) products[row] = mul_add(queries[row][i], key, products[row]);
        }
        UNROLL for (int row = 0; row < count; row++)
        {
            /* A row's scores before its first or behind its own position are not read. */
            float sum = lane_sum(products[row]);
            if (count == 1 || (position >= rows[row].first && position <= rows[row].position))
                rows[row].scores[position - rows[row].first] = sum;
        }
    }
}

/* Replace a row's scores by their exponentials and return the sum of these. */
INLINE float softmax(const attention_head *at)
{
    const int64_t count = at->position + 1 - at->first;
    float *scores = at->scores;
    store(scores + count, all(LOWEST));
    floats highest = all(LOWEST), total = all(0);
    for (int64_t i = 0; i < count; i += LANES)
        highest = max_of(load(scores + i), highest);
    floats maximum = all(lane_max(highest));
    for (int64_t i = 0; i < count; i += LANES) {
        floats weights = exponential(sub(load(scores + i), maximum));
        store(scores + i, weights);
        total = add(total, weights);
    }
    return lane_sum(total);
}

/* Add the weighted values of positions from `begin` to `stop`, for rows from number `from` to before `to`. */
INLINE void add_values(const int bf16, const int size, const int from, const int to, const attention_head *rows,
                       int64_t begin, int64_t stop, floats sums[][MOST_PARTS])
{
    for (int64_t position = begin; position < stop; position++) {
        floats weights[MOST_RUN_ROWS];
        UNROLL for (int row = from; row < to; row++) weights[row] = all(rows[row].scores[position - rows[row].first]);
        UNROLL for (int i = 0; i < size / LANES; i++)
        {
            floats value = load_items(rows[0].values, position * size + i * LANES, bf16);
            UNROLL for (int row = from; row < to; row++) sums[row][i] = mul_add(weights[row], value, sums[row][i]);
        }
    }
}

/* Write the weighted sums of values to each row's output, from index `start` on.
 *
 * Positions that all rows see are read once for all. The others are read for single rows, in the order of positions, and only
 * if the row sees them: NaN times a weight of 0 would be NaN. */
INLINE void weigh_values(const int bf16, const int size, const int count, const attention_head *rows,
                         const float *totals, int64_t start)
{
    floats sums[MOST_RUN_ROWS][MOST_PARTS];
    const int64_t begin = rows[count - 1].first, stop = rows[0].position + 1;
    UNROLL for (int row = 0; row < count; row++)
    {
        UNROLL for (int i = 0; i < size / LANES; i++) sums[row][i] = all(0);
    }
    if (count > 1) {
        UNROLL for (int row = 0; row < count; row++)
            add_values(bf16, size, row, row + 1, rows, rows[row].first, smaller(begin, rows[row].position + 1), sums);
    }
    add_values(bf16, size, 0, count, rows, begin, stop, sums);
    if (count > 1) {
        UNROLL for (int row = 0; row < count; row++)
            add_values(bf16, size, row, row + 1, rows, larger(begin, stop), rows[row].position + 1, sums);
    }
    UNROLL for (int row = 0; row < count; row++)
    {
        floats factor = all(1.0f / totals[row]);
        UNROLL for (int i = 0; i < size / LANES; i++)
            store_items(rows[row].output, start + i * LANES, mul(sums[row][i], factor), bf16);
    }
}

/* As `score` and `weigh_values` for one row, with a head of any size: sums are in memory, in place of the query. */
INLINE void score_any(const int bf16, const int64_t size, const attention_head *at)
{
    for (int64_t position = at->first; position <= at->position; position++) {
        floats products = all(0);
        for (int64_t i = 0; i < size; i += LANES)
            products = mul_add(load(at->query + i), load_items(at->keys, position * size + i, bf16), products);
        at->scores[position - at->first] = lane_sum(products);
    }
}

INLINE void weigh_any(const int bf16, const int64_t size, const attention_head *at, float total, int64_t start)
{
    float *sums = at->query;
    for (int64_t i = 0; i < size; i += LANES)
        store(sums + i, all(0));
    for (int64_t position = at->first; position <= at->position; position++) {
        floats weight = all(at->scores[position - at->first]);
        for (int64_t i = 0; i < size; i += LANES)
            store(sums + i, mul_add(weight, load_items(at->values, position * size + i, bf16), load(sums + i)));
    }
    for (int64_t i = 0; i < size; i += LANES)
        store_items(at->output, start + i, mul(load(sums + i), all(1.0f / total)), bf16);
}

INLINE void attend_run(const attention_shape *shape, const int bf16, const int size, const int count,
                       const attention_head *rows)
{
    const int64_t group = shape->query_heads / shape->kv_heads;
    const floats scaling = all(shape->scaling);
    const int known = size ? size : (int)shape->head_size;
    for (int64_t number = 0; number < group; number++) {
        const int64_t head = rows[0].head * group + number;
        float totals[MOST_RUN_ROWS];
        for (int row = 0; row < count; row++) {
            rotate(shape, known, rows[row].qkv + head * known, rows[row].rotary, rows[row].query_norm, rows[row].query);
            for (int i = 0; i < known; i += LANES)
                store(rows[row].query + i, mul(load(rows[row].query + i), scaling));
        }
        if (size) {
            score(bf16, size, count, rows);
            for (int row = 0; row < count; row++)
                totals[row] = softmax(rows + row);
            weigh_values(bf16, size, count, rows, totals, head * size);
        } else {
            score_any(bf16, known, rows);
            weigh_any(bf16, known, rows, softmax(rows), head * known);
        }
    }
}

/* Loops for the usual sizes of heads, whose sums are in registers, and one (size 0) for the others. */
#define ATTEND(bf16, size, count)                                                                                      \
    NOINLINE void attend_##bf16##_##size##_##count(const attention_shape *shape, const attention_head *rows)           \
    {                                                                                                                  \
        attend_run(shape, bf16, size, count, rows);                                                                    \
    }
#define CALL(bf16, size, run)                                                                                          \
    (count == 1 ? attend_##bf16##_##size##_1 : attend_##bf16##_##size##_##run)(shape, rows);                            \
    break;
#if PORTABLE
#define ATTEND_SIZES(bf16) ATTEND(bf16, 0, 1)
#define ATTEND_SIZE(bf16) default: CALL(bf16, 0, 1)
#else
#define ATTEND_SIZES(bf16)                                                                                             \
    ATTEND(bf16, 32, 1) ATTEND(bf16, 32, 4) ATTEND(bf16, 64, 1) ATTEND(bf16, 64, 4) ATTEND(bf16, 128, 1)               \
    ATTEND(bf16, 128, 2) ATTEND(bf16, 0, 1)
#define ATTEND_SIZE(bf16)                                                                                              \
    case 32: CALL(bf16, 32, 4)                                                                                         \
    case 64: CALL(bf16, 64, 4)                                                                                         \
    case 128: CALL(bf16, 128, 2)                                                                                       \
    default: CALL(bf16, 0, 1)
#endif
ATTEND_SIZES(0)
ATTEND_SIZES(1)

EXPORT void NAME(attend)(const attention_shape *shape, const attention_head *rows, int64_t count)
{
    if (shape->bf16)
        switch (shape->head_size) { ATTEND_SIZE(1) }
    else
        switch (shape->head_size) { ATTEND_SIZE(0) }
}
