-- What wrk sends (the file $BODY, with the headers in $HEADERS, one a line) and, at the end, what came as one line.
local file = assert(io.open(os.getenv("BODY"), "rb"))
wrk.method, wrk.body = "POST", file:read("*a")
file:close()
for name, value in os.getenv("HEADERS"):gmatch("([^\n:]+):([^\n]*)") do wrk.headers[name] = value end

function done(summary, latency, _)
  local e = summary.errors
  print(string.format('RESULT {"responses":%d,"seconds":%.6f,"p50_ms":%.3f,"p99_ms":%.3f,"bytes":%d,"errors":%d}',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    summary.bytes, e.status + e.connect + e.read + e.write + e.timeout))
end
