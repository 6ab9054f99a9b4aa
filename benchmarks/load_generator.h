/* What the load generators share: files, connections, times, and responses of HTTP/1.1. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
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

typedef struct { char *at; size_t size; } Bytes;
typedef struct { double *at; size_t count, capacity; } Samples; /* times in seconds */

static inline double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static inline void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

/* Return the content of a file after `before` bytes that the caller fills. */
static inline Bytes read_file(const char *folder, const char *name, size_t before) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (!file) fail(path);
    fseek(file, 0, SEEK_END);
    size_t size = (size_t)ftell(file);
    rewind(file);
    Bytes bytes = {malloc(before + size + 1), before + size};
    if (fread(bytes.at + before, 1, size, file) != size) fail(path);
    fclose(file);
    return bytes;
}

static inline void raise_file_limit(void) {
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
}

static inline int open_connection(int port, int blocks) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    if (fd < 0) fail("socket");
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd, (struct sockaddr *)&where, sizeof where)) fail("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (!blocks) fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

/* Add a connection to a poller, or change whether it waits for space to write. */
static inline void watch_connection(int poller, int operation, int fd, int want_write, void *connection) {
    struct epoll_event event = {.events = EPOLLIN | (want_write ? EPOLLOUT : 0), .data.ptr = connection};
    epoll_ctl(poller, operation, fd, &event);
}

static inline void add(Samples *samples, double value_s) {
    if (samples->count == samples->capacity) {
        samples->capacity = samples->capacity ? samples->capacity * 2 : 1 << 16;
        samples->at = realloc(samples->at, samples->capacity * sizeof *samples->at);
    }
    samples->at[samples->count++] = value_s;
}

static inline int compare_samples(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline void sort(Samples *samples) {
    if (samples->count) qsort(samples->at, samples->count, sizeof *samples->at, compare_samples);
}

static inline double quantile_ms(const Samples *sorted, double q) {
    if (!sorted->count) return 0;
    size_t at = (size_t)((double)sorted->count * q);
    return sorted->at[at < sorted->count ? at : sorted->count - 1] * 1000;
}

/* A response of HTTP/1.1 while it is received; length: of its body. */
typedef struct {
    int in_body, status, wrong;
    size_t head_size, received, length;
    char head[4096];
} Reply;

static inline void begin(Reply *r) {
    r->head_size = r->received = 0;
    r->in_body = r->status = r->wrong = 0;
}

/* Compare received bytes with the expected body; return 1 when the response is complete. */
static inline int receive_reply(Reply *r, Bytes expected, const char *at, size_t size) {
    if (!r->in_body) {
        size_t old = r->head_size, space = sizeof r->head - 1 - old, used_size = size < space ? size : space;
        memcpy(r->head + old, at, used_size);
        size_t from = old > 3 ? old - 3 : 0;
        char *end = memmem(r->head + from, old + used_size - from, "\r\n\r\n", 4);
        r->head_size += used_size;
        if (!end) {
            if (used_size < size) { fprintf(stderr, "headers too long\n"); exit(1); }
            return 0;
        }
        size_t used = (size_t)(end - r->head) + 4 - old;
        end[2] = 0;
        r->status = strncmp(r->head, "HTTP/1.1 ", 9) ? 0 : atoi(r->head + 9);
        char *match = strcasestr(r->head, "\r\ncontent-length:");
        r->length = match ? strtoul(match + 17, NULL, 10) : expected.size;
        r->in_body = 1;
        at += used;
        size -= used;
    }
    if (r->received + size > expected.size || memcmp(at, expected.at + r->received, size)) r->wrong = 1;
    r->received += size;
    return r->received >= r->length;
}
