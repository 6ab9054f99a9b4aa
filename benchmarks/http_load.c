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
#include "load_generator.h"

typedef struct {
    int fd, want_write;
    double began_s;
    size_t sent;
    Reply reply;
} Connection;

static Bytes request, response;
static Samples durations;
static size_t errors;
static double end_s;
static char buffer[1 << 18];
static int poller;

static void watch_writes(Connection *c, int want_write) {
    if (c->want_write == want_write) return;
    c->want_write = want_write;
    watch_connection(poller, EPOLL_CTL_MOD, c->fd, want_write, c);
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
    c->sent = 0;
    begin(&c->reply);
    write_request(c);
}

static int is_wrong(const Reply *r) {
    return r->wrong || r->status != 200;
}

static void record(Connection *c) {
    add(&durations, now_s() - c->began_s);
    if (is_wrong(&c->reply) || c->reply.length != response.size) errors++;
}

/* Send one request and receive its response, blocking. */
static void exchange(int fd) {
    Reply reply;
    begin(&reply);
    if (send(fd, request.at, request.size, MSG_NOSIGNAL) != (ssize_t)request.size) fail("send");
    for (;;) {
        ssize_t count = recv(fd, buffer, sizeof buffer, 0);
        if (count <= 0) fail("idle connection");
        if (receive_reply(&reply, response, buffer, (size_t)count)) break;
    }
    if (is_wrong(&reply)) errors++;
}

int main(int argc, char **argv) {
    if (argc < 5) { fprintf(stderr, "usage: http_load PORT CONNECTIONS SECONDS FOLDER [IDLE]\n"); return 2; }
    int port = atoi(argv[1]), count = atoi(argv[2]), idle = argc > 5 ? atoi(argv[5]) : 0;
    double seconds = atof(argv[3]);
    request = read_file(argv[4], "request", 0);
    response = read_file(argv[4], "response", 0);
    raise_file_limit();
    poller = epoll_create1(0);
    for (int i = 0; i < idle; i++) exchange(open_connection(port, 1));
    Connection *all = calloc((size_t)count, sizeof *all);
    for (int i = 0; i < count; i++) {
        all[i].fd = open_connection(port, 0);
        watch_connection(poller, EPOLL_CTL_ADD, all[i].fd, 0, &all[i]);
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
            if (!receive_reply(&c->reply, response, buffer, (size_t)count)) continue;
            record(c);
            if (now_s() < end_s) send_request(c);
            else { close(c->fd); open--; }
        }
    }
    seconds = now_s() - began_s;
    sort(&durations);
    printf("{\"responses\": %zu, \"seconds\": %.6f, \"p50_ms\": %.4f, \"p99_ms\": %.4f, \"errors\": %zu}\n", durations.count,
           seconds, quantile_ms(&durations, 0.5), quantile_ms(&durations, 0.99), errors);
    return 0;
}
