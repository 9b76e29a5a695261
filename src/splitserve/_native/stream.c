/* Transfer of a table of copies through a socket in one call, without Python between the system calls.
 *
 * Plain C without Python's headers; loaded through ctypes, which releases Python's lock during the call.
 */
#include <errno.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>

#include "copies.h"

/* Most pieces that Linux and macOS take in one call. */
#define MAX_PIECES 1024
/* The connection has ended, which is not an error of the kernel. */
#define ENDED (-1)

/* What is still to be moved: a head, then the local ends of n copies. */
struct rest {
    const char *head;
    uint64_t head_bytes;
    const struct copy *copies;
    uint64_t n;
    uint64_t offset; /* bytes of the first copy that are done */
    const uint64_t *bases;
    int is_target;
};

static char *place(const struct rest *rest, const struct copy *copy)
{
    return rest->is_target ? target(copy, rest->bases) : (char *)(uintptr_t)source(copy, rest->bases);
}

/* The head and the next max_bytes, or as many as fit MAX_PIECES. Returns the number of pieces: 0 if nothing is left. */
static int next_pieces(const struct rest *rest, struct iovec *pieces, uint64_t max_bytes)
{
    int count = 0;
    if (rest->head_bytes)
        pieces[count++] = (struct iovec){(char *)(uintptr_t)rest->head, rest->head_bytes};
    uint64_t offset = rest->offset;
    for (uint64_t i = 0; i < rest->n && count < MAX_PIECES && max_bytes; i++, offset = 0) {
        uint64_t length = rest->copies[i].length - offset;
        length = length < max_bytes ? length : max_bytes;
        if (length)
            pieces[count++] = (struct iovec){place(rest, &rest->copies[i]) + offset, length};
        max_bytes -= length;
    }
    return count;
}

static void advance(struct rest *rest, uint64_t bytes)
{
    uint64_t of_head = bytes < rest->head_bytes ? bytes : rest->head_bytes;
    rest->head += of_head;
    rest->head_bytes -= of_head;
    bytes -= of_head;
    while (rest->n && rest->copies->length - rest->offset <= bytes) {
        bytes -= rest->copies->length - rest->offset;
        rest->copies++, rest->n--;
        rest->offset = 0;
    }
    rest->offset += bytes;
}

/* Advance by the bytes that the kernel moved. Returns 0 if there may be another call, else the error. */
static int take(struct rest *rest, ssize_t moved)
{
    if (moved < 0)
        return errno == EINTR ? 0 : errno;
    if (moved == 0)
        return ENDED;
    advance(rest, (uint64_t)moved);
    return 0;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Set the kernel's timeout of one send; the socket stays blocking. Returns 0 or an error: EAGAIN if no time is left. */
static int limit_sends(int fd, double seconds)
{
    if (seconds <= 0)
        return EAGAIN;
    struct timeval limit = {.tv_sec = (time_t)seconds};
    limit.tv_usec = (suseconds_t)((seconds - (double)limit.tv_sec) * 1e6);
    /* Zero would mean no limit. */
    if (limit.tv_sec == 0 && limit.tv_usec == 0)
        limit.tv_usec = 1;
    return setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) ? errno : 0;
}

/* Send the head and the sources of n copies in order, at most max_bytes of them per system call (at least 1). Nothing
 * is checked. seconds: for all of it. Returns 0, an error of the kernel (EAGAIN: too late) or ENDED.
 */
int stream_send(int fd, const char *head, uint64_t head_bytes, const struct copy *copies, uint64_t n,
                const uint64_t *from, int flags, uint64_t max_bytes, double seconds)
{
    struct rest rest = {head, head_bytes, copies, n, 0, from, 0};
    struct iovec pieces[MAX_PIECES];
    struct msghdr message = {.msg_iov = pieces};
    double end = now() + seconds;
    while ((message.msg_iovlen = next_pieces(&rest, pieces, max_bytes))) {
        /* The kernel's timeout starts anew with each call. */
        int error = limit_sends(fd, end - now());
        if (error)
            return error;
        error = take(&rest, sendmsg(fd, &message, flags));
        if (error)
            return error;
    }
    return 0;
}

/* Fill the targets of n copies in order. Returns as above; the socket's own timeout applies. */
int stream_receive(int fd, const struct copy *copies, uint64_t n, const uint64_t *to)
{
    struct rest rest = {0, 0, copies, n, 0, to, 1};
    struct iovec pieces[MAX_PIECES];
    struct msghdr message = {.msg_iov = pieces};
    while ((message.msg_iovlen = next_pieces(&rest, pieces, UINT64_MAX))) {
        /* The kernel returns when all pieces are full, or the connection ends. */
        int error = take(&rest, recvmsg(fd, &message, MSG_WAITALL));
        if (error)
            return error;
    }
    return 0;
}
