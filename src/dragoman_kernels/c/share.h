/* Work that is shared by all threads that call a kernel together (dragoman_kernels/threads.py). */
#ifndef DRAGOMAN_SHARE_H
#define DRAGOMAN_SHARE_H

#include <stdatomic.h>
#include <stdint.h>

#if defined(_WIN32)
__declspec(dllimport) int __stdcall SwitchToThread(void);
#define YIELD() SwitchToThread()
#else
#include <sched.h>
#define YIELD() sched_yield()
#endif

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

/* A waiting thread spins this often before it yields its core. */
#define SPINS 4000

/* Counters of one shared loop, 0 before it; far apart so that threads do not write to the same cache line. */
typedef struct {
    _Atomic int64_t next;
    char apart[56];
    _Atomic int64_t done;
    char apart_too[56];
} shared_loop;

/* The next part that this thread is to do; the loop ends with the first number that is not below the count of parts. A
 * thread that arrives late, or never, delays no other:
 *
 *     for (int64_t part = take_part(loop); part < parts; part = next_part(loop))
 *         work(part);
 *     wait_for_parts(loop, parts);
 */
static inline int64_t take_part(shared_loop *loop) { return atomic_fetch_add_explicit(&loop->next, 1, memory_order_acq_rel); }

static inline int64_t next_part(shared_loop *loop)
{
    atomic_fetch_add_explicit(&loop->done, 1, memory_order_acq_rel);
    return take_part(loop);
}

static inline void wait_for_parts(shared_loop *loop, int64_t parts)
{
    for (int64_t spins = 0; atomic_load_explicit(&loop->done, memory_order_acquire) < parts; spins++) {
        PAUSE();
        if (spins > SPINS)
            YIELD();
    }
}

#endif
