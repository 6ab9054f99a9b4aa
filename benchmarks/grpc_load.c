/* A load generator for unary gRPC calls over HTTP/2 without TLS: closed loop, every response compared.
 *
 * usage: grpc_load PORT CONNECTIONS STREAMS SECONDS FOLDER
 *
 * FOLDER holds `first` and `next`, the header blocks of a connection's first request and of all others, `request`
 * and `response`, the messages without their prefix. Prints one line of JSON.
 */
#include "load_generator.h"

typedef struct {
    uint32_t number;
    double began_s;
    size_t sent, received;
    int64_t window;
    int busy, wrong;
} Stream;

typedef struct {
    int fd, settings_received, want_write;
    uint32_t next_number;
    int64_t window;
    size_t unacknowledged;
    Stream *streams;
    uint8_t *out;
    size_t out_at, out_size, out_capacity;
    uint8_t head[9];
    size_t head_size, remaining;
    uint8_t payload[64];
    size_t payload_size;
} Connection;

static Bytes first, next, request, response;
static int stream_count;
static int64_t initial_window = 65535;
static size_t max_frame = 16384;
static Samples durations;
static size_t errors;
static double end_s;
static uint8_t buffer[1 << 18];

static Bytes read_message(const char *folder, const char *name) {
    Bytes bytes = read_file(folder, name, 5);
    uint32_t size = htonl((uint32_t)(bytes.size - 5));
    bytes.at[0] = 0;
    memcpy(bytes.at + 1, &size, 4);
    return bytes;
}

static void put(Connection *c, const void *data, size_t size) {
    if (c->out_size + size > c->out_capacity) {
        c->out_capacity = (c->out_size + size) * 2;
        c->out = realloc(c->out, c->out_capacity);
    }
    memcpy(c->out + c->out_size, data, size);
    c->out_size += size;
}

static void put_frame_header(Connection *c, size_t size, int kind, int flags, uint32_t number) {
    uint8_t head[9] = {(uint8_t)(size >> 16), (uint8_t)(size >> 8), (uint8_t)size, (uint8_t)kind, (uint8_t)flags,
                       (uint8_t)(number >> 24), (uint8_t)(number >> 16), (uint8_t)(number >> 8), (uint8_t)number};
    put(c, head, 9);
}

static void put_word(Connection *c, int kind, uint32_t number, uint32_t value) {
    uint32_t word = htonl(value);
    put_frame_header(c, 4, kind, 0, number);
    put(c, &word, 4);
}

/* Write as much of each request as the flow-control windows allow. */
static void write_data(Connection *c) {
    for (int i = 0; i < stream_count; i++) {
        Stream *s = &c->streams[i];
        while (s->busy && s->sent < request.size && c->window > 0 && s->window > 0) {
            size_t size = request.size - s->sent;
            if (size > max_frame) size = max_frame;
            if ((int64_t)size > c->window) size = (size_t)c->window;
            if ((int64_t)size > s->window) size = (size_t)s->window;
            put_frame_header(c, size, 0, s->sent + size == request.size, s->number);
            put(c, request.at + s->sent, size);
            s->sent += size;
            c->window -= (int64_t)size;
            s->window -= (int64_t)size;
        }
    }
}

static void start_call(Connection *c, Stream *s) {
    Bytes block = c->next_number == 1 ? first : next;
    *s = (Stream){c->next_number, now_s(), 0, 0, initial_window, 1, 0};
    c->next_number += 2;
    put_frame_header(c, block.size, 1, 4, s->number);
    put(c, block.at, block.size);
}

static Stream *find(Connection *c, uint32_t number) {
    for (int i = 0; i < stream_count; i++)
        if (c->streams[i].number == number) return &c->streams[i];
    return NULL;
}

static void finish_call(Connection *c, Stream *s) {
    double at = now_s();
    add(&durations, at - s->began_s);
    if (s->wrong || s->received != response.size) errors++;
    s->busy = 0;
    if (at < end_s) start_call(c, s);
}

static uint32_t word_at(const uint8_t *p) {
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void settings(Connection *c, const uint8_t *p, size_t size) {
    for (; size >= 6; p += 6, size -= 6) {
        int name = p[0] << 8 | p[1];
        uint32_t value = word_at(p + 2);
        if (name == 5) max_frame = value > (1 << 20) ? 1 << 20 : value;
        if (name == 4) {
            int64_t change = (int64_t)value - initial_window;
            initial_window = value;
            for (int i = 0; i < stream_count; i++) c->streams[i].window += change;
        }
    }
    put_frame_header(c, 0, 4, 1, 0);
    if (!c->settings_received) {
        c->settings_received = 1;
        for (int i = 0; i < stream_count; i++) start_call(c, &c->streams[i]);
    }
}

/* A frame has ended; short payloads are in c->payload. */
static void frame_end(Connection *c) {
    int kind = c->head[3], flags = c->head[4];
    uint32_t number = word_at(c->head + 5) & 0x7fffffff;
    Stream *s = number ? find(c, number) : NULL;
    if ((kind == 0 || kind == 1) && (flags & 1) && s) finish_call(c, s);
    if (kind == 3 && s) { s->wrong = 1; finish_call(c, s); }
    if (kind == 4 && !(flags & 1)) settings(c, c->payload, c->payload_size);
    if (kind == 6 && !(flags & 1)) { put_frame_header(c, 8, 6, 1, 0); put(c, c->payload, 8); }
    if (kind == 7) { fprintf(stderr, "GOAWAY %u\n", word_at(c->payload + 4)); errors++; end_s = 0; }
    if (kind == 8) {
        if (!number) c->window += word_at(c->payload);
        else if (s) s->window += word_at(c->payload);
    }
}

static void data(Connection *c, const uint8_t *p, size_t size) {
    Stream *s = find(c, word_at(c->head + 5) & 0x7fffffff);
    if (s) {
        if (s->received + size > response.size || memcmp(response.at + s->received, p, size)) s->wrong = 1;
        s->received += size;
        if (s->received >= 1u << 30) put_word(c, 8, s->number, 1u << 30);
    }
    c->unacknowledged += size;
    if (c->unacknowledged > 1u << 28) { put_word(c, 8, 0, (uint32_t)c->unacknowledged); c->unacknowledged = 0; }
}

static void receive(Connection *c, const uint8_t *p, size_t size) {
    while (size) {
        if (c->head_size < 9) {
            size_t count = 9 - c->head_size < size ? 9 - c->head_size : size;
            memcpy(c->head + c->head_size, p, count);
            c->head_size += count; p += count; size -= count;
            if (c->head_size < 9) return;
            c->remaining = (size_t)c->head[0] << 16 | (size_t)c->head[1] << 8 | c->head[2];
            c->payload_size = 0;
        }
        size_t count = c->remaining < size ? c->remaining : size;
        if (c->head[3] == 0) data(c, p, count);
        else if (c->head[3] != 1 && c->payload_size + count <= sizeof c->payload) {
            memcpy(c->payload + c->payload_size, p, count);
            c->payload_size += count;
        }
        c->remaining -= count; p += count; size -= count;
        if (!c->remaining) { c->head_size = 0; frame_end(c); }
    }
    write_data(c);
}

static void flush(Connection *c, int poll) {
    while (c->out_at < c->out_size) {
        ssize_t n = send(c->fd, c->out + c->out_at, c->out_size - c->out_at, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno != EAGAIN) fail("send");
            break;
        }
        c->out_at += (size_t)n;
    }
    int want = c->out_at < c->out_size;
    if (!want) c->out_at = c->out_size = 0;
    if (want != c->want_write) {
        watch_connection(poll, EPOLL_CTL_MOD, c->fd, want, c);
        c->want_write = want;
    }
}

static Connection *connect_to(int port, int poll) {
    Connection *c = calloc(1, sizeof *c);
    c->fd = open_connection(port, 0);
    c->streams = calloc((size_t)stream_count, sizeof *c->streams);
    c->next_number = 1;
    c->window = 65535;
    static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    /* The largest windows, and the frame size of grpcio's clients. */
    static const uint8_t settings_payload[] = {0, 2, 0, 0, 0, 0, 0, 4, 0x7f, 0xff, 0xff, 0xff, 0, 5, 0, 0x40, 0, 0};
    put(c, preface, 24);
    put_frame_header(c, sizeof settings_payload, 4, 0, 0);
    put(c, settings_payload, sizeof settings_payload);
    put_word(c, 8, 0, 0x7fffffff - 65535);
    watch_connection(poll, EPOLL_CTL_ADD, c->fd, 0, c);
    return c;
}

int main(int argc, char **argv) {
    if (argc != 6) { fprintf(stderr, "usage: grpc_load PORT CONNECTIONS STREAMS SECONDS FOLDER\n"); return 2; }
    int connections = atoi(argv[2]);
    stream_count = atoi(argv[3]);
    first = read_file(argv[5], "first", 0);
    next = read_file(argv[5], "next", 0);
    request = read_message(argv[5], "request");
    response = read_message(argv[5], "response");
    int poll = epoll_create1(0);
    double began_s = now_s();
    end_s = began_s + atof(argv[4]);
    for (int i = 0; i < connections; i++) flush(connect_to(atoi(argv[1]), poll), poll);
    int wait_ms = getenv("LOAD_NEVER_SLEEPS") ? 0 : 100; /* see http_load.c */
    while (now_s() < end_s) {
        struct epoll_event events[256];
        int n = epoll_wait(poll, events, 256, wait_ms);
        for (int i = 0; i < n; i++) {
            Connection *c = events[i].data.ptr;
            if (events[i].events & ~(uint32_t)EPOLLOUT) {
                ssize_t size = recv(c->fd, buffer, sizeof buffer, 0);
                if (size == 0 || (size < 0 && errno != EAGAIN)) { errors++; epoll_ctl(poll, EPOLL_CTL_DEL, c->fd, NULL); continue; }
                if (size > 0) receive(c, buffer, (size_t)size);
            }
            flush(c, poll);
        }
    }
    double seconds = now_s() - began_s;
    sort(&durations);
    printf("{\"responses\": %zu, \"seconds\": %.6f, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"errors\": %zu}\n", durations.count, seconds,
           quantile_ms(&durations, 0.5), quantile_ms(&durations, 0.99), errors);
    return 0;
}
