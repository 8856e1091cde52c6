/* Calls of the system that end the process by SIGKILL at a chosen one: loaded before the C library (LD_PRELOAD).

   Only what changes files below one folder counts. In the mode LOSES_POWER, what was not synced by then is undone first,
   as a machine that stops may do it: bytes of a file until the file is synced, and names until their folder is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WRITES_HALF, LOSES_POWER };
enum { BYTES, CREATED, REMOVED, RENAMED };

struct change {
    int what, fd;
    ino_t file;
    off_t offset, size;
    size_t length;
    char *content, path[PATH_MAX], other[PATH_MAX];
};

static char folder[PATH_MAX];
static long count, last = -1;
static int mode, is_busy;
static struct change *changes;
static size_t n_changes, room;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int below(const char *path) {
    char full[PATH_MAX * 2];
    if (last < 0 || is_busy || !path)
        return 0;
    if (path[0] == '/')
        return !strncmp(path, folder, strlen(folder));
    if (!getcwd(full, PATH_MAX))
        return 0;
    return !strncmp(full, folder, strlen(folder));
}

static int of_folder(int fd) {
    char name[64], path[PATH_MAX];
    if (last < 0 || is_busy)
        return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(name, path, sizeof path - 1);
    if (n < 0)
        return 0;
    path[n] = 0;
    return below(path);
}

static struct change *note(int what) {
    if (n_changes == room)
        changes = realloc(changes, (room = room * 2 + 64) * sizeof *changes);
    struct change *one = &changes[n_changes++];
    memset(one, 0, sizeof *one);
    one->what = what;
    one->fd = -1;
    return one;
}

/* Remember what a write or a truncation from offset on will change. */
static void note_bytes(int fd, off_t offset, size_t length) {
    struct stat facts;
    fstat(fd, &facts);
    struct change *one = note(BYTES);
    one->fd = fcntl(fd, F_DUPFD, 200);
    one->file = facts.st_ino;
    one->offset = offset;
    one->size = facts.st_size;
    if (offset < facts.st_size) {
        one->length = offset + (off_t)length < facts.st_size ? length : (size_t)(facts.st_size - offset);
        one->content = malloc(one->length);
        if (pread(fd, one->content, one->length, offset) != (ssize_t)one->length)
            one->length = 0;
    }
}

static void note_name(int what, const char *path, const char *other) {
    struct change *one = note(what);
    snprintf(one->path, PATH_MAX, "%s", path);
    if (other)
        snprintf(one->other, PATH_MAX, "%s", other);
    struct stat facts;
    const char *lost = what == RENAMED ? other : path;
    if (what != CREATED && !stat(lost, &facts) && S_ISREG(facts.st_mode)) {
        one->fd = open(lost, O_RDONLY);
        one->size = facts.st_size;
        one->content = malloc(facts.st_size + 1);
        one->length = pread(one->fd, one->content, facts.st_size, 0);
        one->file = facts.st_ino;
    }
}

static void undo(struct change *one) {
    if (one->what == BYTES) {
        if (pwrite(one->fd, one->content, one->length, one->offset) < 0)
            return;
        (void)!ftruncate(one->fd, one->size);
    } else if (one->what == CREATED) {
        unlink(one->path);
        rmdir(one->path);
    } else if (one->what == RENAMED)
        rename(one->other, one->path);
    if ((one->what == REMOVED || one->what == RENAMED) && one->fd >= 0) {
        const char *lost = one->what == RENAMED ? one->other : one->path;
        int fd = open(lost, O_RDWR | O_CREAT | O_TRUNC, 0600);
        (void)!pwrite(fd, one->content, one->length, 0);
        close(fd);
    }
}

static void forget_synced(int fd) {
    struct stat facts, parent;
    fstat(fd, &facts);
    size_t kept = 0;
    for (size_t i = 0; i < n_changes; i++) {
        struct change *one = &changes[i];
        int is_synced = one->what == BYTES && one->file == facts.st_ino;
        if (one->what != BYTES && S_ISDIR(facts.st_mode)) {
            char path[PATH_MAX];
            snprintf(path, PATH_MAX, "%s", one->path);
            *strrchr(path, '/') = 0;
            is_synced = !stat(path, &parent) && parent.st_ino == facts.st_ino;
        }
        if (!is_synced)
            changes[kept++] = *one;
    }
    n_changes = kept;
}

/* Count a call, and end the process if it is the one. */
static int is_last(void) { return ++count == last; }

static void die(void) {
    is_busy = 1;
    if (mode == LOSES_POWER)
        while (n_changes)
            undo(&changes[--n_changes]);
    raise(SIGKILL);
}

void crash_arm(const char *below_folder, long at, int how) {
    snprintf(folder, PATH_MAX, "%s", below_folder);
    count = 0;
    mode = how;
    last = at;
}

#define WATCHED(is_ours, remember)                                                                                     \
    if (is_ours) {                                                                                                     \
        if (is_last())                                                                                                 \
            die();                                                                                                     \
        is_busy = 1;                                                                                                   \
        remember;                                                                                                      \
        is_busy = 0;                                                                                                   \
    }

ssize_t pwrite64(int fd, const void *data, size_t n, off64_t offset) {
    if (of_folder(fd)) {
        if (is_last()) {
            if (mode == WRITES_HALF)
                (void)!REAL(pwrite64)(fd, data, n / 2, offset);
            die();
        }
        is_busy = 1;
        note_bytes(fd, offset, n);
        is_busy = 0;
    }
    return REAL(pwrite64)(fd, data, n, offset);
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t offset) { return pwrite64(fd, data, n, offset); }

ssize_t write(int fd, const void *data, size_t n) {
    if (of_folder(fd)) {
        if (is_last()) {
            if (mode == WRITES_HALF)
                (void)!REAL(write)(fd, data, n / 2);
            die();
        }
        is_busy = 1;
        note_bytes(fd, lseek(fd, 0, SEEK_CUR), n);
        is_busy = 0;
    }
    return REAL(write)(fd, data, n);
}

int ftruncate64(int fd, off64_t size) {
    WATCHED(of_folder(fd), note_bytes(fd, size, (size_t)1 << 30))
    return REAL(ftruncate64)(fd, size);
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int fsync(int fd) {
    WATCHED(of_folder(fd), forget_synced(fd))
    return last < 0 ? REAL(fsync)(fd) : 0; /* the power of the real disk stays on */
}
int fdatasync(int fd) { return fsync(fd); }

int unlink(const char *path) {
    WATCHED(below(path) && !access(path, F_OK), note_name(REMOVED, path, NULL))
    return REAL(unlink)(path);
}

int rename(const char *from, const char *to) {
    WATCHED(below(to), note_name(RENAMED, from, to))
    return REAL(rename)(from, to);
}

int mkdir(const char *path, mode_t how) {
    WATCHED(below(path) && access(path, F_OK), note_name(CREATED, path, NULL))
    return REAL(mkdir)(path, how);
}

static int open_of(const char *path, int flags, mode_t how) {
    WATCHED((flags & O_CREAT) && below(path) && access(path, F_OK), note_name(CREATED, path, NULL))
    return REAL(open64)(path, flags, how);
}
int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t how = flags & O_CREAT ? va_arg(more, mode_t) : 0;
    va_end(more);
    return open_of(path, flags, how);
}
int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t how = flags & O_CREAT ? va_arg(more, mode_t) : 0;
    va_end(more);
    return open_of(path, flags, how);
}
