/* A load generator for HTTP/1.1 without TLS: closed loop, every answer compared.
 *
 * usage: http_load PORT CONNECTIONS SECONDS FOLDER [IDLE]
 *
 * FOLDER holds `question`, a whole request, and `answer`, the body that is right, with the frames of its chunks where
 * it has any.
 * IDLE more connections are opened, asked once and left alone. Prints one line of JSON.
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
    double began;
    size_t sent, head_size, heard, length;
    int in_body;
    char head[4096];
} Connection;

static Bytes question, answer;
static double *took;
static size_t took_count, took_room, faults;
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

static Bytes contents(const char *folder, const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (!file) fail(path);
    fseek(file, 0, SEEK_END);
    Bytes found = {NULL, (size_t)ftell(file)};
    rewind(file);
    found.at = malloc(found.size + 1);
    if (fread(found.at, 1, found.size, file) != found.size) fail(path);
    fclose(file);
    return found;
}

static void interest(Connection *c, int want_write) {
    if (c->want_write == want_write) return;
    c->want_write = want_write;
    struct epoll_event event = {.events = EPOLLIN | (want_write ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event);
}

static void push(Connection *c) {
    while (c->sent < question.size) {
        ssize_t count = send(c->fd, question.at + c->sent, question.size - c->sent, MSG_NOSIGNAL);
        if (count < 0) {
            if (errno == EAGAIN) { interest(c, 1); return; }
            fail("send");
        }
        c->sent += (size_t)count;
    }
    interest(c, 0);
}

static void ask(Connection *c) {
    c->began = now_s();
    c->sent = c->head_size = c->heard = 0;
    c->in_body = c->wrong = 0;
    push(c);
}

static void note(Connection *c) {
    if (took_count == took_room) {
        took_room = took_room ? took_room * 2 : 1 << 16;
        took = realloc(took, took_room * sizeof *took);
    }
    took[took_count++] = now_s() - c->began;
    if (c->wrong || c->length != answer.size) faults++;
}

/* The head is complete: its status and the length of the body. */
static void understand(Connection *c) {
    c->head[c->head_size] = 0;
    if (strncmp(c->head, "HTTP/1.1 200", 12)) c->wrong = 1;
    char *found = strcasestr(c->head, "\r\ncontent-length:");
    c->length = found ? strtoul(found + 17, NULL, 10) : answer.size;
    c->in_body = 1;
    c->heard = 0;
}

/* Returns 1 where the answer is whole. */
static int hear(Connection *c, const char *at, size_t size) {
    if (!c->in_body) {
        size_t old = c->head_size, room = sizeof c->head - 1 - old, take = size < room ? size : room;
        memcpy(c->head + old, at, take);
        size_t from = old > 3 ? old - 3 : 0;
        char *end = memmem(c->head + from, old + take - from, "\r\n\r\n", 4);
        if (!end) {
            c->head_size += take;
            if (take < size) { fprintf(stderr, "a head too long\n"); exit(1); }
            return 0;
        }
        c->head_size = (size_t)(end - c->head) + 4;
        size_t used = c->head_size - old;
        understand(c);
        at += used;
        size -= used;
    }
    if (c->heard + size > answer.size || memcmp(at, answer.at + c->heard, size)) c->wrong = 1;
    c->heard += size;
    return c->heard >= c->length;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int dial(int port, int idle) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    if (fd < 0) fail("socket");
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    inet_pton(AF_INET, "127.0.0.1", &where.sin_addr);
    if (connect(fd, (struct sockaddr *)&where, sizeof where)) fail("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (!idle) fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

/* One question and its answer, blocking. */
static void ask_once(int fd) {
    Connection c = {.fd = fd};
    if (send(fd, question.at, question.size, MSG_NOSIGNAL) != (ssize_t)question.size) fail("send");
    for (;;) {
        ssize_t count = recv(fd, buffer, sizeof buffer, 0);
        if (count <= 0) fail("an idle connection");
        if (hear(&c, buffer, (size_t)count)) break;
    }
    if (c.wrong) faults++;
}

int main(int argc, char **argv) {
    if (argc < 5) { fprintf(stderr, "usage: http_load PORT CONNECTIONS SECONDS FOLDER [IDLE]\n"); return 2; }
    int port = atoi(argv[1]), count = atoi(argv[2]), idle = argc > 5 ? atoi(argv[5]) : 0;
    double seconds = atof(argv[3]);
    question = contents(argv[4], "question");
    answer = contents(argv[4], "answer");
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    poller = epoll_create1(0);
    for (int i = 0; i < idle; i++) ask_once(dial(port, 1));
    Connection *all = calloc((size_t)count, sizeof *all);
    for (int i = 0; i < count; i++) {
        all[i].fd = dial(port, 0);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &all[i]};
        epoll_ctl(poller, EPOLL_CTL_ADD, all[i].fd, &event);
    }
    if (idle) { printf("{\"idle\": %d}\n", idle); fflush(stdout); }
    double began = now_s();
    end_s = began + seconds;
    for (int i = 0; i < count; i++) ask(&all[i]);
    int open = count;
    struct epoll_event events[256];
    int never_sleeps = getenv("LOAD_NEVER_SLEEPS") != NULL;
    while (open) {
        int ready = epoll_wait(poller, events, 256, never_sleeps ? 0 : 20000);
        if (!ready && never_sleeps && now_s() < end_s + 20) continue;
        if (ready <= 0) { fprintf(stderr, "no answer for 20 s\n"); return 1; }
        for (int i = 0; i < ready; i++) {
            Connection *c = events[i].data.ptr;
            if (events[i].events & EPOLLOUT) push(c);
            if (!(events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))) continue;
            ssize_t got = recv(c->fd, buffer, sizeof buffer, 0);
            if (got < 0 && errno == EAGAIN) continue;
            if (got <= 0) { fprintf(stderr, "the server hung up\n"); return 1; }
            if (!hear(c, buffer, (size_t)got)) continue;
            note(c);
            if (now_s() < end_s) ask(c);
            else { close(c->fd); open--; }
        }
    }
    seconds = now_s() - began;
    qsort(took, took_count, sizeof *took, by_size);
    double p50 = took_count ? took[took_count / 2] : 0, p99 = took_count ? took[took_count * 99 / 100] : 0;
    printf("{\"answers\": %zu, \"seconds\": %.6f, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"faults\": %zu}\n", took_count,
           seconds, p50 * 1000, p99 * 1000, faults);
    return 0;
}
