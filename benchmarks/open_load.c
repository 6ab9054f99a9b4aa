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
#include "load_generator.h"

#include <math.h>

#define KINDS 8
#define DRAIN_S 5.0

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
static Samples good, rejected;
static Connection **idle;
static Arrival *waiting;
static size_t idle_count, waiting_first, waiting_count, errors, errors_beside, in_time, arrivals;
static double good_s;
static char buffer[1 << 18];
static int poller;

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

static void write_request(Connection *c) {
    Bytes request = requests[c->arrival.kind];
    while (c->sent < request.size) {
        ssize_t count = send(c->fd, request.at + c->sent, request.size - c->sent, MSG_NOSIGNAL);
        if (count < 0 && errno != EAGAIN) fail("send");
        if (count > 0) c->sent += (size_t)count;
        else break;
    }
    int more = c->sent < request.size;
    if (more || c->busy == 2) watch_connection(poller, EPOLL_CTL_MOD, c->fd, more, c);
    c->busy = more ? 2 : 1; /* 2: watches for room to write */
}

static void send_request(Connection *c, Arrival arrival) {
    c->arrival = arrival;
    c->sent_s = now_s();
    c->sent = 0;
    begin(&c->reply);
    c->busy = 1;
    write_request(c);
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

int main(int argc, char **argv) {
    if (argc < 8) { fprintf(stderr, "usage: open_load PORT CONNECTIONS SECONDS FOLDER RATE GOOD_MS WEIGHT...\n"); return 2; }
    int port = atoi(argv[1]), count = atoi(argv[2]);
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
        idle[idle_count++] = &all[i];
        watch_connection(poller, EPOLL_CTL_ADD, all[i].fd, 0, &all[i]);
    }
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
            if (receive_reply(&c->reply, responses[c->arrival.kind], buffer, (size_t)received)) finish(c);
        }
    }
    sort(&good);
    sort(&rejected);
    size_t lost = arrivals - good.count - rejected.count - errors;
    printf("{\"arrivals\": %zu, \"responses\": %zu, \"rejected\": %zu, \"lost\": %zu, \"errors\": %zu, "
           "\"seconds\": %.6f, \"goodput\": %.2f, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"p999_ms\": %.4f, \"max_ms\": %.4f, "
           "\"rejected_p99_ms\": %.4f, \"late_ms\": %.4f}\n",
           arrivals, good.count, rejected.count, lost, errors + errors_beside, seconds, (double)in_time / seconds,
           quantile_ms(&good, 0.5), quantile_ms(&good, 0.99), quantile_ms(&good, 0.999), quantile_ms(&good, 1),
           quantile_ms(&rejected, 0.99), late_s * 1000);
    return 0;
}
