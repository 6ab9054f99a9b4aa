/* Clients of many token streams over HTTP/1.1: each sends one request and reads server-sent events until the stream
 * ends. A token contains one `~`, so a token is counted once however many of them an event or a read contains.
 *
 * usage: stream_load PORT STREAMS TOKENS LIMIT_S FOLDER
 *
 * FOLDER holds `request`. A stream is correct if it has status 200, TOKENS tokens and `[DONE]`. Prints one line of JSON:
 * gaps are the times between two reads of a stream that contain tokens. After LIMIT_S seconds it stops.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define CONNECTING 500 /* fewer than a backlog of connections */

typedef struct { int fd, tokens, answered, status_ok, matched_event, matched_end, correct; double last_s; } Stream;

static char request[1 << 16], buffer[1 << 18];
static double *gaps;
static size_t gap_count, gap_capacity, tokens, events_seen;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static void add_gap(double gap_s) {
    if (gap_count == gap_capacity) {
        gap_capacity = gap_capacity ? gap_capacity * 2 : 1 << 20;
        gaps = realloc(gaps, gap_capacity * sizeof *gaps);
    }
    gaps[gap_count++] = gap_s;
}

/* Count the tokens and events of a read; a text may be split between two reads. */
static void scan(Stream *s, const char *at, size_t size, double now) {
    static const char event[] = "data: {", end[] = "[DONE]";
    int before = s->tokens;
    if (!s->answered) { s->answered = 1; s->status_ok = size > 12 && !memcmp(at, "HTTP/1.1 200", 12); }
    for (size_t i = 0; i < size; i++) {
        char c = at[i];
        s->tokens += c == '~';
        s->matched_event = c == event[s->matched_event] ? s->matched_event + 1 : c == event[0];
        if (!event[s->matched_event]) { s->matched_event = 0; events_seen++; }
        if (!end[s->matched_end]) continue;
        s->matched_end = c == end[s->matched_end] ? s->matched_end + 1 : c == end[0];
    }
    if (s->tokens == before) return;
    tokens += (size_t)(s->tokens - before);
    if (before) add_gap(now - s->last_s);
    s->last_s = now;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    if (argc != 6) { fprintf(stderr, "usage: stream_load PORT STREAMS TOKENS LIMIT_S FOLDER\n"); return 2; }
    int count = atoi(argv[2]), wanted = atoi(argv[3]), opened = 0, ended = 0, correct = 0;
    double limit_s = atof(argv[4]);
    char path[4096];
    snprintf(path, sizeof path, "%s/request", argv[5]);
    FILE *file = fopen(path, "rb");
    if (!file) fail(path);
    size_t request_size = fread(request, 1, sizeof request, file);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[1]))};
    inet_pton(AF_INET, "127.0.0.1", &where.sin_addr);
    int poller = epoll_create1(0), unanswered = 0;
    Stream *all = calloc((size_t)count, sizeof *all);
    struct epoll_event found[256];
    double began_s = now_s(), now = began_s;
    while (ended < count && now < began_s + limit_s) {
        for (; opened < count && unanswered < CONNECTING; opened++, unanswered++) {
            Stream *s = &all[opened];
            int one = 1;
            if ((s->fd = socket(AF_INET, SOCK_STREAM, 0)) < 0) fail("socket");
            if (connect(s->fd, (struct sockaddr *)&where, sizeof where)) fail("connect");
            setsockopt(s->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            fcntl(s->fd, F_SETFL, O_NONBLOCK);
            if (send(s->fd, request, request_size, MSG_NOSIGNAL) != (ssize_t)request_size) fail("send");
            struct epoll_event event = {.events = EPOLLIN, .data.ptr = s};
            epoll_ctl(poller, EPOLL_CTL_ADD, s->fd, &event);
        }
        int ready = epoll_wait(poller, found, 256, 100);
        now = now_s();
        for (int i = 0; i < ready; i++) {
            Stream *s = found[i].data.ptr;
            ssize_t received = recv(s->fd, buffer, sizeof buffer, 0);
            if (received < 0 && errno == EAGAIN) continue;
            if (!s->answered) unanswered--;
            if (received > 0) scan(s, buffer, (size_t)received, now);
            if (received > 0 && s->status_ok && s->matched_end < 6) continue;
            s->answered = 1;
            correct += s->status_ok && s->tokens == wanted && s->matched_end == 6;
            close(s->fd);
            ended++;
        }
    }
    qsort(gaps, gap_count, sizeof *gaps, by_size);
    printf("{\"streams\": %d, \"ended\": %d, \"correct\": %d, \"tokens\": %zu, \"events\": %zu, \"seconds\": %.4f, "
           "\"gap_p50_ms\": %.3f, \"gap_p99_ms\": %.3f, \"gap_max_ms\": %.3f}\n",
           count, ended, correct, tokens, events_seen, now_s() - began_s, gap_count ? gaps[gap_count / 2] * 1000 : 0,
           gap_count ? gaps[gap_count * 99 / 100] * 1000 : 0, gap_count ? gaps[gap_count - 1] * 1000 : 0);
    return 0;
}
