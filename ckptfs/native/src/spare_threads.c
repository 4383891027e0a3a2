/* Threads that answer the kernel when the thread that usually does is held up.
 *
 * On few processors one busy thread serves a reader faster than two that alternate: it is never woken, its buffers stay
 * in its processor's cache, and the reader keeps a processor. So libfuse's loop runs in a single thread. Spare threads
 * check once a tick whether a request waits while that thread has answered none; then they take over until it answers
 * again. They also answer while many requests wait at once: direct I/O and sources that are far away.
 */
#include "native.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>

enum {
    MAX_THREADS = 64,
    TICK_MS = 10,     /* a virtual machine may need 0.2 ms for a timer */
    QUIET_TICKS = 10, /* without an answer, before a spare thread sleeps until a request comes */
};

typedef int (*receive_request)(void *session, void *request);
typedef void (*process_request)(void *session, const void *request);

static struct {
    void *session;
    int fd;
    receive_request receive;
    process_request process;
} fuse;
static pthread_t threads[MAX_THREADS];
static int64_t n_threads, n_answers, n_wakes;
static __thread int is_spare;

void ckptfs_count_answer(void)
{
    if (!is_spare)
        __atomic_fetch_add(&n_answers, 1, __ATOMIC_RELAXED);
}

void ckptfs_wake_spare_threads(void)
{
    __atomic_fetch_add(&n_wakes, 1, __ATOMIC_RELAXED);
}

static int64_t current(const int64_t *count)
{
    return __atomic_load_n(count, __ATOMIC_RELAXED);
}

/* Wait for a request and answer it. 0 when the session has ended. */
static int answer_one(void *request)
{
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
    int received = fuse.receive(fuse.session, request);
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    if (received > 0)
        fuse.process(fuse.session, request);
    return received > 0 || received == -EINTR || received == -EAGAIN;
}

/* Whether a request waits, after at most `timeout` ms; -1 when the mount is gone. */
static int is_request_waiting(int timeout)
{
    struct pollfd device = {fuse.fd, POLLIN, 0};
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
    int ready = poll(&device, 1, timeout);
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    if (ready < 0)
        return errno == EINTR ? 0 : -1;
    return device.revents & (POLLERR | POLLHUP | POLLNVAL) ? -1 : ready;
}

/* Answer until the usual thread does. 0 when the session has ended. */
static int take_over(void *request, int64_t n_answers_then)
{
    int is_open;
    do
        is_open = answer_one(request);
    while (is_open && current(&n_answers) == n_answers_then);
    return is_open;
}

static void *run_spare_thread(void *unused)
{
    /* libfuse's `struct fuse_buf`, with space for fields of later versions. libfuse allocates its memory at the first
       request. It is never freed: versions differ in how that is done. */
    int64_t request[32] = {0};
    const struct timespec tick = {0, TICK_MS * 1000000};
    int64_t n_answers_then = current(&n_answers), n_wakes_then = current(&n_wakes);
    int quiet_ticks = QUIET_TICKS, is_open = 1;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    is_spare = 1;
    while (is_open) {
        if (current(&n_wakes) != n_wakes_then) {
            n_wakes_then = current(&n_wakes);
            is_open = answer_one(request);
            continue;
        }
        if (quiet_ticks >= QUIET_TICKS) {
            if (is_request_waiting(-1) < 0)
                break;
            quiet_ticks = 0;
            n_answers_then = current(&n_answers);
        }
        nanosleep(&tick, NULL);
        int is_waiting = is_request_waiting(0);
        if (is_waiting < 0)
            break;
        if (current(&n_answers) != n_answers_then) {
            n_answers_then = current(&n_answers);
            quiet_ticks = 0;
        } else if (is_waiting)
            is_open = take_over(request, n_answers_then);
        else
            quiet_ticks++;
    }
    return unused;
}

/* Start `n` spare threads for a libfuse session, whose device is `fd`; returns how many were started. */
int64_t ckptfs_start_spare_threads(void *session, int fd, receive_request receive, process_request process, int64_t n)
{
    fuse.session = session, fuse.fd = fd, fuse.receive = receive, fuse.process = process;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the thread that mounted */
    for (n_threads = 0; n_threads < n && n_threads < MAX_THREADS; n_threads++)
        if (pthread_create(&threads[n_threads], NULL, run_spare_thread, NULL))
            break;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return n_threads;
}

/* End them, each after the request that it is answering. Called before the session ends. */
void ckptfs_stop_spare_threads(void)
{
    for (int64_t i = 0; i < n_threads; i++)
        pthread_cancel(threads[i]);
    for (int64_t i = 0; i < n_threads; i++)
        pthread_join(threads[i], NULL);
    n_threads = 0;
}
