/* posix_spawn, pidfd and PR_SET_PDEATHSIG. Never fork: it does not survive threads, CUDA or sanitizers. */
#include "server/front/spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "server/front/cluster.h"

extern char **environ;

/* What the new process sees as its descriptors 0..3; everything above is closed, whoever opened it. */
static int add_files(posix_spawn_file_actions_t *fa, int worker_end) {
    int e = posix_spawn_file_actions_adddup2(fa, worker_end, EPX_WORKER_FD);
    if (e == 0) e = posix_spawn_file_actions_addopen(fa, 0, "/dev/null", O_RDONLY, 0);
    if (e == 0) e = posix_spawn_file_actions_adddup2(fa, 2, 1);
    if (e == 0) e = posix_spawn_file_actions_addclosefrom_np(fa, EPX_WORKER_FD + 1);
    return e;
}

/* Default signal actions and an empty mask, whatever the calling thread has. */
static int set_signals(posix_spawnattr_t *attr) {
    sigset_t all, none;
    int e;
    sigfillset(&all);
    sigemptyset(&none);
    e = posix_spawnattr_setsigdefault(attr, &all);
    if (e == 0) e = posix_spawnattr_setsigmask(attr, &none);
    if (e == 0) e = posix_spawnattr_setflags(attr, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
    return e;
}

static int spawn_with(const char *program, int worker_end, pid_t *out_pid) {
    char number[16], name[] = "epx", flag[] = EPX_WORKER_ARGUMENT;
    char *argv[] = {name, flag, number, NULL};
    posix_spawn_file_actions_t fa;
    posix_spawnattr_t attr;
    int e;
    snprintf(number, sizeof number, "%d", (int)EPX_WORKER_FD);
    e = posix_spawn_file_actions_init(&fa);
    if (e) return e;
    e = posix_spawnattr_init(&attr);
    if (e) goto err_actions;
    e = add_files(&fa, worker_end);
    if (e == 0) e = set_signals(&attr);
    if (e == 0) e = posix_spawn(out_pid, program, &fa, &attr, argv, environ);
    posix_spawnattr_destroy(&attr);
err_actions:
    posix_spawn_file_actions_destroy(&fa);
    return e;
}

epx_status_t epx_process_spawn(const char *program, epx_process_t *out_p) {
    epx_status_t s;
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return epx_fail_errno(EPX_ERR_OS, errno, "socketpair");
    s = epx_process_spawn_on(program, ends[1], out_p);
    close(ends[1]);
    if (s < 0) close(ends[0]);
    else out_p->fd = ends[0];
    return s;
}

epx_status_t epx_process_spawn_on(const char *program, int socket_fd, epx_process_t *out_p) {
    epx_process_t p = {.pidfd = -1, .fd = -1};
    epx_status_t s;
    int e = spawn_with(program, socket_fd, &p.pid);
    if (e) return epx_fail_errno(EPX_ERR_OS, e, "starting a rank with %s", program);
    p.pidfd = (int)syscall(SYS_pidfd_open, p.pid, 0); /* close-on-exec by definition */
    if (p.pidfd < 0) {
        s = epx_fail_errno(EPX_ERR_OS, errno, "pidfd_open of rank process %d (Linux 5.4 or newer is needed)", (int)p.pid);
        kill(p.pid, SIGKILL);
        waitpid(p.pid, NULL, 0);
        return s;
    }
    *out_p = p;
    return EPX_OK;
}

int epx_process_reap(epx_process_t *p, char *out_how, size_t n_bytes) {
    siginfo_t si = {0};
    const char *name;
    if (p->pid == 0) return 0;
    if (waitid(P_PID, (id_t)p->pid, &si, WEXITED | WNOHANG) != 0 || si.si_pid == 0) return 0;
    if (si.si_code == CLD_EXITED && si.si_status == EPX_EXIT_STUCK) {
        snprintf(out_how, n_bytes, "made no progress for the time of --watchdog-timeout and ended itself");
    } else if (si.si_code == CLD_EXITED) {
        snprintf(out_how, n_bytes, "ended with exit code %d", si.si_status);
    } else {
        name = sigabbrev_np(si.si_status);
        snprintf(out_how, n_bytes, "was killed by signal %d (SIG%s)", si.si_status, name ? name : "?");
    }
    close(p->pidfd);
    p->pidfd = -1;
    p->pid = 0;
    return 1;
}

int epx_process_is_stopped(const epx_process_t *p) {
    siginfo_t si = {0};
    return p->pid && waitid(P_PID, (id_t)p->pid, &si, WSTOPPED | WNOHANG | WNOWAIT) == 0 && si.si_pid != 0;
}

void epx_process_kill(epx_process_t *p) {
    if (p->pid) syscall(SYS_pidfd_send_signal, p->pidfd, SIGKILL, NULL, 0);
}

epx_status_t epx_process_bind_to_front(int fd) {
    struct ucred front;
    socklen_t n = sizeof front;
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return epx_fail_errno(EPX_ERR_OS, errno, "PR_SET_PDEATHSIG");
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &front, &n) != 0)
        return epx_fail_errno(EPX_ERR_ARG, errno, "%s %d: not the socket of a front", EPX_WORKER_ARGUMENT, fd);
    /* The front may have died before the line above took effect. A front on another host has no process number here; when both it
     * and the node that started this process are gone, so is the connection. */
    if (front.pid && getppid() != front.pid) return epx_fail(EPX_ERR_PEER, "the front process %d is gone", (int)front.pid);
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    return fcntl(fd, F_SETFD, FD_CLOEXEC) == 0 ? EPX_OK
                                               : epx_fail_errno(EPX_ERR_OS, errno, "close-on-exec of the front's socket");
}
