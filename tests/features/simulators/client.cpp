// A client of UM-Bridge with nothing but sockets: asks each verb on one connection and prints the bodies.
// usage: client PORT

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

static int connected(int port) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(port);
    inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
    if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) { perror("connect"); exit(1); }
    return fd;
}

struct Answer { int status; std::string body; };

static Answer ask(int fd, const std::string& method, const std::string& path, const std::string& body) {
    std::string request = method + " " + path + " HTTP/1.1\r\nHost: localhost\r\nContent-Length: " +
                          std::to_string(body.size()) + "\r\n\r\n" + body;
    if (write(fd, request.data(), request.size()) != (ssize_t)request.size()) { perror("write"); exit(1); }
    std::string came;
    char buffer[4096];
    size_t head = std::string::npos, length = 0;
    while (head == std::string::npos || came.size() < head + 4 + length) {
        ssize_t count = read(fd, buffer, sizeof buffer);
        if (count <= 0) { fprintf(stderr, "hung up after: %s\n", came.c_str()); exit(1); }
        came.append(buffer, count);
        if (head == std::string::npos && (head = came.find("\r\n\r\n")) != std::string::npos) {
            size_t at = strcasestr(came.c_str(), "content-length:") - came.c_str();
            length = strtoul(came.c_str() + at + 15, nullptr, 10);
        }
    }
    return {atoi(came.c_str() + 9), came.substr(head + 4, length)};
}

// The numbers of a JSON text, in order; strtod takes 1e999 for infinity.
static std::vector<double> numbers(const std::string& text) {
    std::vector<double> found;
    const char* at = strchr(text.c_str(), ':');
    while (at != nullptr && *at != 0) {
        char* end;
        double value = strtod(at, &end);
        if (end == at) { ++at; } else { found.push_back(value); at = end; }
    }
    return found;
}

static void tell(const char* what, const Answer& answer) {
    printf("%s %d", what, answer.status);
    for (double value : numbers(answer.body)) printf(" %.17g", value);
    printf("\n");
}

int main(int, char** arguments) {
    int fd = connected(atoi(arguments[1]));
    const std::string at = "\"name\":\"forward\",\"config\":{},\"input\":[[0.1,2],[3,4,5]]";
    Answer info = ask(fd, "GET", "/Info", "");
    printf("Info %d %g\n", info.status, numbers(info.body).at(0));
    tell("InputSizes", ask(fd, "POST", "/InputSizes", "{\"name\":\"forward\",\"config\":{}}"));
    tell("OutputSizes", ask(fd, "POST", "/OutputSizes", "{\"name\":\"forward\",\"config\":{}}"));
    tell("Evaluate", ask(fd, "POST", "/Evaluate", "{" + at + "}"));
    tell("Gradient", ask(fd, "POST", "/Gradient", "{" + at + ",\"outWrt\":0,\"inWrt\":0,\"sens\":[1,10]}"));
    tell("ApplyJacobian", ask(fd, "POST", "/ApplyJacobian", "{" + at + ",\"outWrt\":1,\"inWrt\":1,\"vec\":[1,1,1]}"));
    tell("ApplyHessian", ask(fd, "POST", "/ApplyHessian",
                             "{" + at + ",\"outWrt\":1,\"inWrt1\":1,\"inWrt2\":1,\"sens\":[2],\"vec\":[1,2,3]}"));
    tell("Infinity", ask(fd, "POST", "/Evaluate", "{\"name\":\"Faulty\",\"input\":[[2]]}"));
    Answer fault = ask(fd, "POST", "/Evaluate", "{\"name\":\"forward\",\"input\":[[1]]}");
    printf("Fault %d %s\n", fault.status, fault.body.substr(0, 31).c_str());
    close(fd);
}
