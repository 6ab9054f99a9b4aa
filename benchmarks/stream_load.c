/* Clients of many token streams over HTTP/1.1: each sends one request and reads server-sent events until the stream
 * ends. A token contains one `~`, so a token is counted once however many of them an event or a read contains.
 *
 * usage: stream_load PORT STREAMS TOKENS LIMIT_S FOLDER
 *
 * FOLDER holds `request`. A stream is correct if it has status 200, TOKENS tokens and `[DONE]`. Prints one line of JSON:
 * gaps are the times between two reads of a stream that contain tokens. After LIMIT_S seconds it stops.
 */
#include "load_generator.h"

#define CONNECTING 500 /* fewer than a backlog of connections */

typedef struct { int fd, tokens, answered, status_ok, matched_event, matched_end, correct; double last_s; } Stream;

static char buffer[1 << 18];
static Samples gaps;
static size_t tokens, events_seen;

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
    if (before) add(&gaps, now - s->last_s);
    s->last_s = now;
}

int main(int argc, char **argv) {
    if (argc != 6) { fprintf(stderr, "usage: stream_load PORT STREAMS TOKENS LIMIT_S FOLDER\n"); return 2; }
    int count = atoi(argv[2]), wanted = atoi(argv[3]), opened = 0, ended = 0, correct = 0;
    double limit_s = atof(argv[4]);
    Bytes request = read_file(argv[5], "request", 0);
    raise_file_limit();
    int poller = epoll_create1(0), unanswered = 0;
    Stream *all = calloc((size_t)count, sizeof *all);
    struct epoll_event found[256];
    double began_s = now_s(), now = began_s;
    while (ended < count && now < began_s + limit_s) {
        for (; opened < count && unanswered < CONNECTING; opened++, unanswered++) {
            Stream *s = &all[opened];
            s->fd = open_connection(atoi(argv[1]), 0);
            if (send(s->fd, request.at, request.size, MSG_NOSIGNAL) != (ssize_t)request.size) fail("send");
            watch_connection(poller, EPOLL_CTL_ADD, s->fd, 0, s);
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
    sort(&gaps);
    printf("{\"streams\": %d, \"ended\": %d, \"correct\": %d, \"tokens\": %zu, \"events\": %zu, \"seconds\": %.4f, "
           "\"gap_p50_ms\": %.3f, \"gap_p99_ms\": %.3f, \"gap_max_ms\": %.3f}\n",
           count, ended, correct, tokens, events_seen, now_s() - began_s, quantile_ms(&gaps, 0.5),
           quantile_ms(&gaps, 0.99), quantile_ms(&gaps, 1));
    return 0;
}
