/* Threads that answer the kernel when the one that usually does is held up.
 *
 * Where there are few processors, a thread that is always busy serves a reader faster than two that take turns: it is
 * never woken, its buffers stay in its processor's cache, and the reader has a processor of its own. So libfuse's loop
 * runs in one thread, and these look once in a tick whether a request waits while that one has answered none. Then they
 * answer until it does; and all the time while requests come for which that is said to pay: direct I/O, far sources.
 */
#include "native.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>

enum {
    MOST = 64,
    TICK_MS = 10, /* a virtual machine may need 0.2 ms for a timer */
    QUIET_TICKS = 10, /* without an answer, until a helper sleeps until something comes */
};

typedef int (*receive_one)(void *session, void *request);
typedef void (*process_one)(void *session, const void *request);

static struct {
    void *session;
    int fd;
    receive_one receive;
    process_one process;
} fuse;
static pthread_t helpers[MOST];
static int64_t n_helpers, answered, invited;
static __thread int helping;

void ckptfs_answered(void)
{
    if (!helping)
        __atomic_fetch_add(&answered, 1, __ATOMIC_RELAXED);
}

void ckptfs_invite_help(void)
{
    __atomic_fetch_add(&invited, 1, __ATOMIC_RELAXED);
}

static int64_t now(const int64_t *count)
{
    return __atomic_load_n(count, __ATOMIC_RELAXED);
}

/* Take a request, waiting for one, and answer it. 0 when there will be none any more. */
static int answer_one(void *request)
{
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
    int got = fuse.receive(fuse.session, request);
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    if (got > 0)
        fuse.process(fuse.session, request);
    return got > 0 || got == -EINTR || got == -EAGAIN;
}

/* Whether a request waits, after at most `timeout` ms; -1 when the mount is gone. */
static int waiting(int timeout)
{
    struct pollfd asked = {fuse.fd, POLLIN, 0};
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
    int got = poll(&asked, 1, timeout);
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    if (got < 0)
        return errno == EINTR ? 0 : -1;
    return asked.revents & (POLLERR | POLLHUP | POLLNVAL) ? -1 : got;
}

static void *help(void *unused)
{
    /* libfuse's `struct fuse_buf` with room for what later versions add. It gets its memory at the first request, and
       keeps it: versions differ in how it is freed. */
    int64_t request[32] = {0};
    const struct timespec tick = {0, TICK_MS * 1000000};
    int64_t answered_then = now(&answered), invited_then = now(&invited);
    int quiet = QUIET_TICKS, goes_on = 1;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    helping = 1;
    while (goes_on) {
        if (now(&invited) != invited_then) {
            invited_then = now(&invited);
            goes_on = answer_one(request);
            continue;
        }
        if (quiet >= QUIET_TICKS) {
            if (waiting(-1) < 0)
                break;
            quiet = 0;
            answered_then = now(&answered);
        }
        nanosleep(&tick, NULL);
        int wanted = waiting(0);
        if (wanted < 0)
            break;
        if (now(&answered) != answered_then) {
            answered_then = now(&answered);
            quiet = 0;
        } else if (wanted) {
            do
                goes_on = answer_one(request);
            while (goes_on && now(&answered) == answered_then);
        } else
            quiet++;
    }
    return unused;
}

/* Start `n` of them for a libfuse session, whose device is `fd`; how many there are. */
int64_t ckptfs_help(void *session, int fd, receive_one receive, process_one process, int64_t n)
{
    fuse.session = session, fuse.fd = fd, fuse.receive = receive, fuse.process = process;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the thread that mounted */
    for (n_helpers = 0; n_helpers < n && n_helpers < MOST; n_helpers++)
        if (pthread_create(&helpers[n_helpers], NULL, help, NULL))
            break;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return n_helpers;
}

/* End them, each after the request that it is answering; before the session is. */
void ckptfs_end_help(void)
{
    for (int64_t i = 0; i < n_helpers; i++)
        pthread_cancel(helpers[i]);
    for (int64_t i = 0; i < n_helpers; i++)
        pthread_join(helpers[i], NULL);
    n_helpers = 0;
}
