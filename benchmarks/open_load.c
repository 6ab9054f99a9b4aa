/* An open-loop load generator for HTTP/1.1 without TLS: requests of several kinds arrive at random times at a given
 * rate, independent of responses. Each is sent on an idle connection, or waits for one; its latency counts from the
 * time at which it was due. Every response is compared.
 *
 * usage: open_load PORT CONNECTIONS SECONDS FOLDER RATE GOOD_MS WEIGHT...
 *
 * FOLDER holds `request0`, a whole request, and the body `response0` that it expects, and so on for each weight. A
 * negative weight is that of requests beside the others, which are not in the figures. With rate 0 the loop is closed:
 * each connection sends its next request at once.
 * Responses 429 and 503 are rejections, whose time counts from sending. Before the time begins, each connection gets
 * one response: a server accepts thousands of connections for half a second, which is no part of its latency.
 * Prints one line of JSON. `late`: time between when a request was due and when this program handled it, because other
 * programs had the core or it was busy; it is part of the latencies. It never sleeps, so that it is exact to a few
 * microseconds.
 */
#include "load_generator.h"

#include <math.h>

#define KINDS 8
#define DRAIN_S 5.0
#define OPENED_AT_ONCE 64
#define MOST_REOPENED 100000
#define BUSY 1
#define WANTS_TO_SEND 2 /* and watches for room */
#define ANSWERED_EARLY 3 /* before the whole request was sent, as rejections are */

typedef struct { double due_s; int kind; } Arrival;

typedef struct {
    int fd, busy;
    Arrival arrival;
    double sent_s;
    size_t sent;
    Reply reply;
} Connection;

static Bytes requests[KINDS], responses[KINDS];
static double weights[KINDS], total_weight;
static int kinds;
static Samples good, rejected, late;
static Connection **idle;
static Arrival *waiting;
static size_t idle_count, waiting_first, waiting_count, errors, errors_beside, in_time, arrivals, reopened;
static double good_s;
static char buffer[1 << 18];
static int poller, port;

static Bytes read_kind(const char *folder, const char *name, int kind) {
    char path[64];
    snprintf(path, sizeof path, "%s%d", name, kind);
    return read_file(folder, path, 0);
}

static double uniform(void) { /* splitmix64, in (0, 1] */
    static uint64_t state = 7;
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)(((z ^ (z >> 31)) >> 11) + 1) * 0x1.0p-53;
}

static void release(Connection *c);

static int is_unanswered(const Connection *c) {
    return !c->busy || (c->busy != ANSWERED_EARLY && !c->reply.head_size);
}

/* Replace a connection that the server has closed because it was idle: some do after 5 s. */
static void reopen(Connection *c) {
    if (++reopened > MOST_REOPENED) { fprintf(stderr, "the server closes connections without a response\n"); exit(1); }
    close(c->fd);
    c->fd = open_connection(port, 0);
    c->sent = 0;
    watch_connection(poller, EPOLL_CTL_ADD, c->fd, 0, c);
}

static void write_request(Connection *c) {
    Bytes request = requests[c->arrival.kind];
    while (c->sent < request.size) {
        ssize_t count = send(c->fd, request.at + c->sent, request.size - c->sent, MSG_NOSIGNAL);
        if (count < 0 && (errno == EPIPE || errno == ECONNRESET) && is_unanswered(c)) {
            reopen(c);
            continue;
        }
        if (count < 0 && errno != EAGAIN) fail("send");
        if (count > 0) c->sent += (size_t)count;
        else break;
    }
    int more = c->sent < request.size, is_answered = c->busy == ANSWERED_EARLY;
    if (more || c->busy != BUSY) watch_connection(poller, EPOLL_CTL_MOD, c->fd, more, c);
    if (!is_answered) c->busy = more ? WANTS_TO_SEND : BUSY;
    else if (!more) release(c);
}

static void send_request(Connection *c, Arrival arrival) {
    c->arrival = arrival;
    c->sent_s = now_s();
    c->sent = 0;
    begin(&c->reply);
    c->busy = BUSY;
    write_request(c);
}

static void release(Connection *c) {
    c->busy = 0;
    if (waiting_first < waiting_count) send_request(c, waiting[waiting_first++]);
    else idle[idle_count++] = c;
}

static void finish(Connection *c) {
    const Reply *r = &c->reply;
    double now = now_s();
    int beside = weights[c->arrival.kind] < 0;
    int is_rejected = r->status == 429 || r->status == 503;
    if (beside) errors_beside += !is_rejected && (r->status != 200 || r->wrong);
    else if (is_rejected) add(&rejected, now - c->sent_s);
    else if (r->status != 200 || r->wrong || r->length != responses[c->arrival.kind].size) errors++;
    else {
        add(&good, now - c->arrival.due_s);
        in_time += now - c->arrival.due_s <= good_s;
    }
    if (c->sent < requests[c->arrival.kind].size) c->busy = ANSWERED_EARLY;
    else release(c);
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

/* Receive what has arrived, or exit. */
static void handle(const struct epoll_event *event) {
    Connection *c = event->data.ptr;
    if (event->events & EPOLLOUT) write_request(c);
    if (!(event->events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    ssize_t received = recv(c->fd, buffer, sizeof buffer, 0);
    if (received < 0 && errno == EAGAIN) return;
    if (received <= 0 && is_unanswered(c)) {
        reopen(c);
        if (c->busy) write_request(c);
        return;
    }
    if (received <= 0 || !c->busy || c->busy == ANSWERED_EARLY) {
        fprintf(stderr, "the server closed a connection, or sent more than a response\n");
        exit(1);
    }
    if (receive_reply(&c->reply, responses[c->arrival.kind], buffer, (size_t)received)) finish(c);
}

static void handle_ready(void) {
    struct epoll_event events[256];
    int ready = epoll_wait(poller, events, 256, 0);
    for (int i = 0; i < ready; i++) handle(&events[i]);
}

/* Get one response on each connection, a few at a time, and forget the figures. */
static void warm_up(Connection *all, size_t count) {
    for (size_t sent = 0; sent < count || idle_count < count;) {
        for (; sent < count && sent - idle_count < OPENED_AT_ONCE; sent++)
            send_request(&all[sent], (Arrival){now_s(), 0});
        handle_ready();
    }
    good.count = rejected.count = errors = in_time = 0;
}

int main(int argc, char **argv) {
    if (argc < 8) { fprintf(stderr, "usage: open_load PORT CONNECTIONS SECONDS FOLDER RATE GOOD_MS WEIGHT...\n"); return 2; }
    int count = atoi(argv[2]);
    port = atoi(argv[1]);
    double seconds = atof(argv[3]), rate = atof(argv[5]);
    kinds = argc - 7 < KINDS ? argc - 7 : KINDS;
    good_s = atof(argv[6]) / 1000;
    for (int i = 0; i < kinds; i++) {
        requests[i] = read_kind(argv[4], "request", i);
        responses[i] = read_kind(argv[4], "response", i);
        total_weight += fabs(weights[i] = atof(argv[7 + i]));
    }
    raise_file_limit();
    poller = epoll_create1(0);
    idle = calloc((size_t)count, sizeof *idle);
    waiting = calloc((size_t)(rate * seconds * 1.5) + 10000, sizeof *waiting);
    Connection *all = calloc((size_t)count, sizeof *all);
    for (int i = 0; i < count; i++) {
        all[i].fd = open_connection(port, 0);
        watch_connection(poller, EPOLL_CTL_ADD, all[i].fd, 0, &all[i]);
    }
    warm_up(all, (size_t)count);
    double began_s = now_s(), end_s = began_s + seconds, due_s = began_s;
    for (;;) {
        double now = now_s();
        if (now >= end_s) due_s = end_s;
        else if (!rate) while (idle_count) arrive(now);
        else for (; due_s <= now && due_s < end_s; due_s += -log(uniform()) / rate) {
            add(&late, now - due_s);
            arrive(due_s);
        }
        if (due_s >= end_s && idle_count == (size_t)count) break;
        if (now > end_s + DRAIN_S) break;
        handle_ready();
    }
    sort(&good);
    sort(&rejected);
    sort(&late);
    size_t lost = arrivals - good.count - rejected.count - errors;
    printf("{\"arrivals\": %zu, \"responses\": %zu, \"rejected\": %zu, \"lost\": %zu, \"errors\": %zu, "
           "\"seconds\": %.6f, \"goodput\": %.2f, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"p999_ms\": %.4f, \"max_ms\": %.4f, "
           "\"rejected_p99_ms\": %.4f, \"late_p999_ms\": %.4f, \"late_ms\": %.4f}\n",
           arrivals, good.count, rejected.count, lost, errors + errors_beside, seconds, (double)in_time / seconds,
           quantile_ms(&good, 0.5), quantile_ms(&good, 0.99), quantile_ms(&good, 0.999), quantile_ms(&good, 1),
           quantile_ms(&rejected, 0.99), quantile_ms(&late, 0.999), quantile_ms(&late, 1));
    return 0;
}
