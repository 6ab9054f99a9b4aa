/* An open-loop load generator for HTTP/1.1 without TLS: requests of several kinds arrive at random times at a given
 * rate, independent of responses. Each is sent on an idle connection, or waits for one; its latency counts from the
 * time at which it was due. Every response is compared.
 *
 * usage: open_load PORT CONNECTIONS SECONDS FOLDER RATE GOOD_MS WEIGHT...
 *
 * FOLDER holds `request0`, a whole request, and the body `response0` that it expects, and so on for each weight. A
 * negative weight is that of requests beside the others, which are not in the figures. With rate 0 the loop is closed:
 * each connection sends its next request at once.
 * Responses 429 and 503 are rejections, whose time counts from sending. Prints one line of JSON. It never sleeps, so
 * that it is exact to a few microseconds.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define KINDS 8
#define DRAIN_S 5.0

typedef struct { char *at; size_t size; } Bytes;
typedef struct { double *at; size_t count, capacity; } Times;
typedef struct { double due_s; int kind; } Arrival;

typedef struct {
    int fd, busy, in_body, status, wrong;
    Arrival arrival;
    double sent_s;
    size_t sent, head_size, received, length;
    char head[4096];
} Connection;

static Bytes requests[KINDS], responses[KINDS];
static double weights[KINDS], total_weight;
static int kinds;
static Times good, rejected;
static Connection **idle;
static Arrival *waiting;
static size_t idle_count, waiting_first, waiting_count, errors, in_time, arrivals;
static double good_s;
static char buffer[1 << 18];
static int poller;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static Bytes read_file(const char *folder, const char *name, int kind) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s%d", folder, name, kind);
    FILE *file = fopen(path, "rb");
    if (!file) fail(path);
    fseek(file, 0, SEEK_END);
    Bytes bytes = {NULL, (size_t)ftell(file)};
    rewind(file);
    bytes.at = malloc(bytes.size + 1);
    if (fread(bytes.at, 1, bytes.size, file) != bytes.size) fail(path);
    fclose(file);
    return bytes;
}

static double uniform(void) { /* splitmix64, in (0, 1] */
    static uint64_t state = 7;
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)(((z ^ (z >> 31)) >> 11) + 1) * 0x1.0p-53;
}

static void add(Times *times, double value_s) {
    if (times->count == times->capacity) {
        times->capacity = times->capacity ? times->capacity * 2 : 1 << 16;
        times->at = realloc(times->at, times->capacity * sizeof *times->at);
    }
    times->at[times->count++] = value_s;
}

static void write_request(Connection *c) {
    Bytes request = requests[c->arrival.kind];
    while (c->sent < request.size) {
        ssize_t count = send(c->fd, request.at + c->sent, request.size - c->sent, MSG_NOSIGNAL);
        if (count < 0 && errno != EAGAIN) fail("send");
        if (count > 0) c->sent += (size_t)count;
        else break;
    }
    int more = c->sent < request.size;
    struct epoll_event event = {.events = EPOLLIN | (more ? EPOLLOUT : 0), .data.ptr = c};
    if (more || c->busy == 2) epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event);
    c->busy = more ? 2 : 1; /* 2: watches for room to write */
}

static void send_request(Connection *c, Arrival arrival) {
    c->arrival = arrival;
    c->sent_s = now_s();
    c->sent = c->head_size = c->received = 0;
    c->in_body = c->wrong = 0;
    c->busy = 1;
    write_request(c);
}

static void finish(Connection *c) {
    double now = now_s();
    Bytes expected = responses[c->arrival.kind];
    int beside = weights[c->arrival.kind] < 0;
    if (beside) errors += c->status != 200 || c->wrong;
    else if (c->status == 429 || c->status == 503) add(&rejected, now - c->sent_s);
    else if (c->status != 200 || c->wrong || c->length != expected.size) errors++;
    else {
        add(&good, now - c->arrival.due_s);
        in_time += now - c->arrival.due_s <= good_s;
    }
    c->busy = 0;
    if (waiting_first < waiting_count) send_request(c, waiting[waiting_first++]);
    else idle[idle_count++] = c;
}

/* Send a request of a random kind, or let it wait for a connection. */
static void arrive(double due_s) {
    double at = uniform() * total_weight;
    Arrival arrival = {due_s, 0};
    while (arrival.kind < kinds - 1 && (at -= fabs(weights[arrival.kind])) > 0) arrival.kind++;
    arrivals += weights[arrival.kind] > 0;
    if (idle_count) send_request(idle[--idle_count], arrival);
    else waiting[waiting_count++] = arrival;
}

/* Return 1 when the response is complete. */
static int receive(Connection *c, const char *at, size_t size) {
    if (!c->in_body) {
        size_t old = c->head_size, space = sizeof c->head - 1 - old, used_size = size < space ? size : space;
        memcpy(c->head + old, at, used_size);
        size_t from = old > 3 ? old - 3 : 0;
        char *end = memmem(c->head + from, old + used_size - from, "\r\n\r\n", 4);
        c->head_size += used_size;
        if (!end) {
            if (used_size < size) { fprintf(stderr, "headers too long\n"); exit(1); }
            return 0;
        }
        size_t used = (size_t)(end - c->head) + 4 - old;
        end[2] = 0;
        c->status = atoi(c->head + 9);
        char *match = strcasestr(c->head, "\r\ncontent-length:");
        c->length = match ? strtoul(match + 17, NULL, 10) : responses[c->arrival.kind].size;
        c->in_body = 1;
        at += used;
        size -= used;
    }
    Bytes expected = responses[c->arrival.kind];
    if (c->received + size > expected.size || memcmp(at, expected.at + c->received, size)) c->wrong = 1;
    c->received += size;
    return c->received >= c->length;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile_ms(Times *times, double q) {
    if (!times->count) return 0;
    size_t at = (size_t)((double)times->count * q);
    return times->at[at < times->count ? at : times->count - 1] * 1000;
}

static void open_connections(Connection *all, int count, int port) {
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    inet_pton(AF_INET, "127.0.0.1", &where.sin_addr);
    for (int i = 0; i < count; i++) {
        int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
        if (fd < 0) fail("socket");
        if (connect(fd, (struct sockaddr *)&where, sizeof where)) fail("connect");
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        fcntl(fd, F_SETFL, O_NONBLOCK);
        all[i].fd = fd;
        idle[idle_count++] = &all[i];
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &all[i]};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    }
}

int main(int argc, char **argv) {
    if (argc < 8) { fprintf(stderr, "usage: open_load PORT CONNECTIONS SECONDS FOLDER RATE GOOD_MS WEIGHT...\n"); return 2; }
    int port = atoi(argv[1]), count = atoi(argv[2]);
    double seconds = atof(argv[3]), rate = atof(argv[5]);
    kinds = argc - 7 < KINDS ? argc - 7 : KINDS;
    good_s = atof(argv[6]) / 1000;
    for (int i = 0; i < kinds; i++) {
        requests[i] = read_file(argv[4], "request", i);
        responses[i] = read_file(argv[4], "response", i);
        total_weight += fabs(weights[i] = atof(argv[7 + i]));
    }
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    poller = epoll_create1(0);
    idle = calloc((size_t)count, sizeof *idle);
    waiting = calloc((size_t)(rate * seconds * 1.5) + 10000, sizeof *waiting);
    Connection *all = calloc((size_t)count, sizeof *all);
    open_connections(all, count, port);
    double began_s = now_s(), end_s = began_s + seconds, due_s = began_s, late_s = 0;
    struct epoll_event events[256];
    for (;;) {
        double now = now_s();
        if (now >= end_s) due_s = end_s;
        else if (!rate) while (idle_count) arrive(now);
        else for (; due_s <= now && due_s < end_s; due_s += -log(uniform()) / rate) {
            if (now - due_s > late_s) late_s = now - due_s;
            arrive(due_s);
        }
        if (due_s >= end_s && idle_count == (size_t)count) break;
        if (now > end_s + DRAIN_S) break;
        int ready = epoll_wait(poller, events, 256, 0);
        for (int i = 0; i < ready; i++) {
            Connection *c = events[i].data.ptr;
            if (events[i].events & EPOLLOUT) write_request(c);
            if (!(events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))) continue;
            ssize_t received = recv(c->fd, buffer, sizeof buffer, 0);
            if (received < 0 && errno == EAGAIN) continue;
            if (received <= 0 || !c->busy) { fprintf(stderr, "the server closed a connection\n"); return 1; }
            if (receive(c, buffer, (size_t)received)) finish(c);
        }
    }
    qsort(good.at, good.count, sizeof *good.at, by_size);
    qsort(rejected.at, rejected.count, sizeof *rejected.at, by_size);
    size_t lost = arrivals - good.count - rejected.count - errors;
    printf("{\"arrivals\": %zu, \"responses\": %zu, \"rejected\": %zu, \"lost\": %zu, \"errors\": %zu, "
           "\"seconds\": %.6f, \"goodput\": %.2f, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"p999_ms\": %.4f, \"max_ms\": %.4f, "
           "\"rejected_p99_ms\": %.4f, \"late_ms\": %.4f}\n",
           arrivals, good.count, rejected.count, lost, errors, seconds, (double)in_time / seconds,
           quantile_ms(&good, 0.5), quantile_ms(&good, 0.99), quantile_ms(&good, 0.999), quantile_ms(&good, 1),
           quantile_ms(&rejected, 0.99), late_s * 1000);
    return 0;
}
