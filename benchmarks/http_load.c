/* A load generator for HTTP/1.1 without TLS: closed loop, every response compared.
 *
 * usage: http_load PORT CONNECTIONS SECONDS FOLDER [IDLE]
 *
 * FOLDER holds `request`, a whole request, and the expected body `response`, with its chunk
 * sizes if it is chunked.
 * IDLE more connections are opened, used for one request each and then left idle. Prints one line of JSON.
 *
 * With LOAD_NEVER_SLEEPS in the environment it asks the kernel for responses without waiting. A server that writes to
 * a sleeping client pays for waking it, which on a virtual machine costs more than the write, and a slower server
 * pays more often, so its CPU per request would be exaggerated.
 */
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

typedef struct {
    int fd, want_write, wrong;
    double began_s;
    size_t sent, head_size, received, length;
    int in_body;
    char head[4096];
} Connection;

static Bytes request, response;
static double *durations;
static size_t duration_count, duration_capacity, errors;
static double end_s;
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

static Bytes read_file(const char *folder, const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (!file) fail(path);
    fseek(file, 0, SEEK_END);
    Bytes file_bytes = {NULL, (size_t)ftell(file)};
    rewind(file);
    file_bytes.at = malloc(file_bytes.size + 1);
    if (fread(file_bytes.at, 1, file_bytes.size, file) != file_bytes.size) fail(path);
    fclose(file);
    return file_bytes;
}

static void watch_writes(Connection *c, int want_write) {
    if (c->want_write == want_write) return;
    c->want_write = want_write;
    struct epoll_event event = {.events = EPOLLIN | (want_write ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event);
}

static void write_request(Connection *c) {
    while (c->sent < request.size) {
        ssize_t count = send(c->fd, request.at + c->sent, request.size - c->sent, MSG_NOSIGNAL);
        if (count < 0) {
            if (errno == EAGAIN) { watch_writes(c, 1); return; }
            fail("send");
        }
        c->sent += (size_t)count;
    }
    watch_writes(c, 0);
}

static void send_request(Connection *c) {
    c->began_s = now_s();
    c->sent = c->head_size = c->received = 0;
    c->in_body = c->wrong = 0;
    write_request(c);
}

static void record(Connection *c) {
    if (duration_count == duration_capacity) {
        duration_capacity = duration_capacity ? duration_capacity * 2 : 1 << 16;
        durations = realloc(durations, duration_capacity * sizeof *durations);
    }
    durations[duration_count++] = now_s() - c->began_s;
    if (c->wrong || c->length != response.size) errors++;
}

/* Parse the status and the length of the body. */
static void parse_headers(Connection *c) {
    c->head[c->head_size] = 0;
    if (strncmp(c->head, "HTTP/1.1 200", 12)) c->wrong = 1;
    char *match = strcasestr(c->head, "\r\ncontent-length:");
    c->length = match ? strtoul(match + 17, NULL, 10) : response.size;
    c->in_body = 1;
    c->received = 0;
}

/* Return 1 when the response is complete. */
static int receive(Connection *c, const char *at, size_t size) {
    if (!c->in_body) {
        size_t old = c->head_size, space = sizeof c->head - 1 - old, used_size = size < space ? size : space;
        memcpy(c->head + old, at, used_size);
        size_t from = old > 3 ? old - 3 : 0;
        char *end = memmem(c->head + from, old + used_size - from, "\r\n\r\n", 4);
        if (!end) {
            c->head_size += used_size;
            if (used_size < size) { fprintf(stderr, "headers too long\n"); exit(1); }
            return 0;
        }
        c->head_size = (size_t)(end - c->head) + 4;
        size_t used = c->head_size - old;
        parse_headers(c);
        at += used;
        size -= used;
    }
    if (c->received + size > response.size || memcmp(at, response.at + c->received, size)) c->wrong = 1;
    c->received += size;
    return c->received >= c->length;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int open_connection(int port, int idle) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    if (fd < 0) fail("socket");
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    inet_pton(AF_INET, "127.0.0.1", &where.sin_addr);
    if (connect(fd, (struct sockaddr *)&where, sizeof where)) fail("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (!idle) fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

/* Send one request and receive its response, blocking. */
static void exchange(int fd) {
    Connection c = {.fd = fd};
    if (send(fd, request.at, request.size, MSG_NOSIGNAL) != (ssize_t)request.size) fail("send");
    for (;;) {
        ssize_t count = recv(fd, buffer, sizeof buffer, 0);
        if (count <= 0) fail("idle connection");
        if (receive(&c, buffer, (size_t)count)) break;
    }
    if (c.wrong) errors++;
}

int main(int argc, char **argv) {
    if (argc < 5) { fprintf(stderr, "usage: http_load PORT CONNECTIONS SECONDS FOLDER [IDLE]\n"); return 2; }
    int port = atoi(argv[1]), count = atoi(argv[2]), idle = argc > 5 ? atoi(argv[5]) : 0;
    double seconds = atof(argv[3]);
    request = read_file(argv[4], "request");
    response = read_file(argv[4], "response");
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    poller = epoll_create1(0);
    for (int i = 0; i < idle; i++) exchange(open_connection(port, 1));
    Connection *all = calloc((size_t)count, sizeof *all);
    for (int i = 0; i < count; i++) {
        all[i].fd = open_connection(port, 0);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &all[i]};
        epoll_ctl(poller, EPOLL_CTL_ADD, all[i].fd, &event);
    }
    if (idle) { printf("{\"idle\": %d}\n", idle); fflush(stdout); }
    double began_s = now_s();
    end_s = began_s + seconds;
    for (int i = 0; i < count; i++) send_request(&all[i]);
    int open = count;
    struct epoll_event events[256];
    int never_sleeps = getenv("LOAD_NEVER_SLEEPS") != NULL;
    while (open) {
        int ready = epoll_wait(poller, events, 256, never_sleeps ? 0 : 20000);
        if (!ready && never_sleeps && now_s() < end_s + 20) continue;
        if (ready <= 0) { fprintf(stderr, "no response for 20 s\n"); return 1; }
        for (int i = 0; i < ready; i++) {
            Connection *c = events[i].data.ptr;
            if (events[i].events & EPOLLOUT) write_request(c);
            if (!(events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))) continue;
            ssize_t count = recv(c->fd, buffer, sizeof buffer, 0);
            if (count < 0 && errno == EAGAIN) continue;
            if (count <= 0) { fprintf(stderr, "the server closed the connection\n"); return 1; }
            if (!receive(c, buffer, (size_t)count)) continue;
            record(c);
            if (now_s() < end_s) send_request(c);
            else { close(c->fd); open--; }
        }
    }
    seconds = now_s() - began_s;
    qsort(durations, duration_count, sizeof *durations, by_size);
    double p50 = duration_count ? durations[duration_count / 2] : 0, p99 = duration_count ? durations[duration_count * 99 / 100] : 0;
    printf("{\"responses\": %zu, \"seconds\": %.6f, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"errors\": %zu}\n", duration_count,
           seconds, p50 * 1000, p99 * 1000, errors);
    return 0;
}
