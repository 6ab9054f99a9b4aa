/* A step of all layers of a decoder, as one function that all threads call. */
#include "step.h"
#include "gate.h"
#include "norm.h"
#include "share.h"

/* Blocks of columns in one part of the last product. */
#define LOGIT_BLOCKS 4

INLINE int64_t padded(int64_t columns) { return (columns + COLUMNS - 1) / COLUMNS * COLUMNS; }
INLINE int64_t item_size(const decoder *model) { return model->attention.bf16 ? 2 : 4; }

static void embed(const decoder_step *step, int64_t row)
{
    const decoder *model = step->model;
    float *states = model->states + row * padded(model->hidden);
    if (model->embedding_file) {
        const segment *of = model->embedding_file;
        NAME(blocks_rows)(of->type, of->weights, of->row_bytes, model->hidden, step->tokens + row, 1, states);
        return;
    }
    for (int64_t i = 0; i < model->hidden; i += LANES)
        store(states + i, load_items(model->embedding, step->tokens[row] * model->hidden + i, (int)model->attention.bf16));
}

/* Normalize the states of `rows` rows, for this thread. */
static void norm_states(const decoder_step *step, const float *weight, int64_t first, int64_t rows, void *normed)
{
    const decoder *model = step->model;
    for (int64_t row = first; row < first + rows; row++)
        norm_row(model->states + row * padded(model->hidden), weight, normed, row * model->hidden, model->hidden,
                 model->attention.eps, (int)model->attention.bf16);
}

/* Normalize the states of the rows whose logits are computed. */
static void norm_outputs(const decoder_step *step, void *normed)
{
    const decoder *model = step->model;
    for (int64_t number = 0; number < step->output_count; number++)
        norm_row(model->states + step->output_rows[number] * padded(model->hidden), model->norm, normed,
                 number * model->hidden, model->hidden, model->attention.eps, (int)model->attention.bf16);
}

/* A head of a row, which is number `in_run` of its run. */
static attention_head head_of(const decoder_step *step, int64_t number, const decoder_layer *layer, int64_t row,
                              int64_t head, int64_t in_run, const step_scratch *scratch)
{
    const decoder *model = step->model;
    const attention_shape *shape = &model->attention;
    const int64_t size = shape->head_size, position = step->positions[row];
    const int64_t cache = number * step->layer_bytes + step->slots[row] * step->slot_bytes + head * step->head_bytes;
    const int64_t row_bytes = shape->query_heads * size * item_size(model);
    return (attention_head){
        .head = head,
        .position = position,
        .first = layer->window > 0 ? larger(position + 1 - layer->window, 0) : 0,
        .qkv = model->qkv + row * padded((shape->query_heads + 2 * shape->kv_heads) * size),
        .rotary = model->rotary + position * 2 * size,
        .keys = (char *)step->keys + cache,
        .values = (char *)step->values + cache,
        .output = (char *)model->attended + row * row_bytes,
        .query_norm = layer->query_norm,
        .key_norm = layer->key_norm,
        .query = scratch->query + in_run * size,
        .scores = scratch->scores + in_run * scratch->score_count,
    };
}

static void attend_part(const decoder_step *step, int64_t number, const decoder_layer *layer, int64_t part,
                        const step_scratch *scratch)
{
    const attention_shape *shape = &step->model->attention;
    const int64_t *run = step->runs + part / shape->kv_heads * 2;
    attention_head heads[MOST_RUN_ROWS];
    for (int64_t i = 0; i < run[1]; i++)
        heads[i] = head_of(step, number, layer, run[0] + i, part % shape->kv_heads, i, scratch);
    NAME(attend)(shape, heads, run[1]);
}

/* Read the inputs of a layer whose weights are in blocks, all rows for this thread. */
static void read_inputs(const decoder *model, const linear_layer *layer, const void *inputs, int64_t row_bytes,
                        int64_t rows, const step_scratch *scratch)
{
    if (!layer->blocked)
        return;
    for (int64_t row = 0; row < rows; row++) {
        const void *from = (const char *)inputs + row * row_bytes;
        NAME(blocks_read)(layer->blocked, from, model->attention.bf16, rows, row, &scratch->inputs);
    }
}

/* Compute a part of a product, after `read_inputs`. */
static void multiply_part(const linear_layer *layer, const void *inputs, int64_t row_bytes, int64_t rows, int64_t part,
                          const step_scratch *scratch, float *output, int64_t output_columns, int64_t add_to_output)
{
    if (layer->blocked)
        NAME(blocks_part)(layer->blocked, &scratch->inputs, rows, part, output, output_columns, add_to_output);
    else
        NAME(product_part)(layer, inputs, row_bytes, rows, part, scratch->sums, output, output_columns, add_to_output);
}

/* Add the contributions of a run's adapter to the outputs of a linear layer. */
static void adapt_run(const decoder_step *step, int64_t layer, int linear, int64_t part, const void *inputs,
                      int64_t row_bytes, const step_scratch *scratch, float *output, int64_t output_columns)
{
    const adapted_run *run = step->adapted + part;
    NAME(adapt)(run->layers + layer * LINEAR_LAYERS + linear, (const char *)inputs + run->first * row_bytes, row_bytes,
                run->rows, step->model->attention.bf16, scratch->sums, output + run->first * output_columns,
                output_columns);
}

/* Normalize the states of a run of adapted rows, for this thread, which may have had no part of the layer's product. */
static void norm_run(const decoder_step *step, const float *weight, int64_t part, void *normed)
{
    norm_states(step, weight, step->adapted[part].first, step->adapted[part].rows, normed);
}

/* Execute `work` for each `part` of the next shared loop; `prepare` before this thread's first part. */
#define SHARE(parts_, prepare, work)                                                                                   \
    do {                                                                                                               \
        const int64_t parts = (parts_);                                                                                \
        int64_t part = take_part(loop);                                                                                \
        if (part < parts) {                                                                                            \
            prepare;                                                                                                   \
            for (; part < parts; part = next_part(loop))                                                               \
                work;                                                                                                  \
        }                                                                                                              \
        wait_for_parts(loop++, parts);                                                                                 \
    } while (0)

/* Execute `work` for each run of rows with an adapter, if there are any. */
#define ADAPT(work)                                                                                                    \
    do {                                                                                                               \
        if (step->adapted_count)                                                                                       \
            SHARE(step->adapted_count, , work);                                                                        \
    } while (0)

EXPORT void NAME(step)(const decoder_step *step, const step_scratch *scratch)
{
    const decoder *model = step->model;
    const attention_shape *shape = &model->attention;
    const int64_t rows = step->rows, panels = panels_of(rows), hidden = padded(model->hidden);
    const int64_t heads = padded((shape->query_heads + 2 * shape->kv_heads) * shape->head_size);
    const int64_t gates = padded(2 * model->intermediate), item = item_size(model);
    const int64_t normed_bytes = model->hidden * item, mlp_bytes = padded(model->intermediate) * item;
    const int64_t attended_bytes = shape->query_heads * shape->head_size * item;
    shared_loop *loop = step->counters;

    SHARE(rows, , embed(step, part));
    for (int64_t number = 0; number < model->layer_count; number++) {
        const decoder_layer *layer = model->layers + number;
        SHARE(panels * layer->qkv.blocks, {
            norm_states(step, layer->input_norm, 0, rows, scratch->normed);
            read_inputs(model, &layer->qkv, scratch->normed, normed_bytes, rows, scratch);
        },
              multiply_part(&layer->qkv, scratch->normed, normed_bytes, rows, part, scratch, model->qkv, heads, 0));
        ADAPT({
            norm_run(step, layer->input_norm, part, scratch->normed);
            adapt_run(step, number, QKV, part, scratch->normed, normed_bytes, scratch, model->qkv, heads);
        });
        SHARE(rows * shape->kv_heads, , {
            attention_head head =
                head_of(step, number, layer, part / shape->kv_heads, part % shape->kv_heads, 0, scratch);
            NAME(store_key_value)(shape, &head);
        });
        SHARE(step->run_count * shape->kv_heads, , attend_part(step, number, layer, part, scratch));
        SHARE(panels * layer->out.blocks,
              read_inputs(model, &layer->out, model->attended, attended_bytes, rows, scratch),
              multiply_part(&layer->out, model->attended, attended_bytes, rows, part, scratch, model->states,
                            hidden, 1));
        ADAPT(adapt_run(step, number, OUT, part, model->attended, attended_bytes, scratch, model->states, hidden));
        SHARE(panels * layer->gate_up.blocks, {
            norm_states(step, layer->mlp_norm, 0, rows, scratch->normed);
            read_inputs(model, &layer->gate_up, scratch->normed, normed_bytes, rows, scratch);
        },
              multiply_part(&layer->gate_up, scratch->normed, normed_bytes, rows, part, scratch, model->gates,
                            gates, 0));
        ADAPT({
            norm_run(step, layer->mlp_norm, part, scratch->normed);
            adapt_run(step, number, GATE_UP, part, scratch->normed, normed_bytes, scratch, model->gates, gates);
        });
        SHARE(rows, ,
              NAME(gate)(model->gates + part * gates, (char *)model->mlp + part * mlp_bytes, model->intermediate,
                         shape->bf16));
        SHARE(panels * layer->down.blocks, read_inputs(model, &layer->down, model->mlp, mlp_bytes, rows, scratch),
              multiply_part(&layer->down, model->mlp, mlp_bytes, rows, part, scratch, model->states, hidden, 1));
        ADAPT(adapt_run(step, number, DOWN, part, model->mlp, mlp_bytes, scratch, model->states, hidden));
    }
    const int64_t blocks = model->head.blocks, output_panels = panels_of(step->output_count);
    SHARE((blocks + LOGIT_BLOCKS - 1) / LOGIT_BLOCKS * output_panels, {
        norm_outputs(step, scratch->normed);
        read_inputs(model, &model->head, scratch->normed, normed_bytes, step->output_count, scratch);
    }, {
        const int64_t first = part / output_panels * LOGIT_BLOCKS;
        for (int64_t block = first; block < smaller(first + LOGIT_BLOCKS, blocks); block++)
            multiply_part(&model->head, scratch->normed, normed_bytes, step->output_count,
                          block * output_panels + part % output_panels, scratch, step->logits, blocks * COLUMNS, 0);
    });
}
