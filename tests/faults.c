/* Preloaded into a process: makes the nth file operation below a folder fail once.

   Operations are those that change files: opening for writing, write, fsync, truncate, rename,
   link, unlink, rmdir and mkdir, of every library of the process. A write that fails has written
   half. fsync flushes nothing. Without `fault_arm` nothing is changed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[4096];
static size_t length;
static long point;
static int fault, report = -1;
static atomic_long count;

/* Count operations below `folder`; the `n`th fails with `error`. Its name is written to `file`. */
void fault_arm(const char *folder, long n, int error, int file) {
    strncpy(root, folder, sizeof root - 1);
    length = strlen(root), point = n, fault = error, report = file, count = 0;
}

long fault_count(void) { return count; }

static int hit(const char *name, int descriptor, const char *path) {
    char folder[4096] = "", link[64];
    if (!length) return 0;
    if (!path || path[0] != '/') {
        snprintf(link, sizeof link, descriptor == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d",
                 descriptor);
        ssize_t size = readlink(link, folder, sizeof folder - 1);
        folder[size < 0 ? 0 : size] = 0;
    }
    const char *whole = folder[0] ? folder : path ? path : "";
    if (strncmp(whole, root, length) || (whole[length] && whole[length] != '/')) return 0;
    if (++count != point) return 0;
    dprintf(report, "%s %s%s%s", name, folder, path && folder[0] ? "/" : "", path ? path : "");
    errno = fault;
    return 1;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))
#define MODE(flags) mode_t mode = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { \
    va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }
#define OPEN(name) int name(const char *path, int flags, ...) { REAL(name); MODE(flags) \
    return WRITES(flags) && hit("open", AT_FDCWD, path) ? -1 : real(path, flags, mode); }
#define OPENAT(name) int name(int at, const char *path, int flags, ...) { REAL(name); MODE(flags) \
    return WRITES(flags) && hit("open", at, path) ? -1 : real(at, path, flags, mode); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

ssize_t write(int file, const void *data, size_t size) {
    REAL(write);
    if (!hit("write", file, NULL)) return real(file, data, size);
    real(file, data, size / 2);
    return errno = fault, -1;
}
ssize_t writev(int file, const struct iovec *parts, int number) {
    REAL(writev);
    return hit("write", file, NULL) ? -1 : real(file, parts, number);
}
#define PWRITE(name) ssize_t name(int file, const void *data, size_t size, off_t at) { REAL(name); \
    return hit("write", file, NULL) ? -1 : real(file, data, size, at); }
PWRITE(pwrite) PWRITE(pwrite64)

#define FLUSH(name) int name(int file) { REAL(name); \
    return hit("fsync", file, NULL) ? -1 : length ? 0 : real(file); }
FLUSH(fsync) FLUSH(fdatasync)
#define CUT(name) int name(int file, off_t size) { REAL(name); \
    return hit("truncate", file, NULL) ? -1 : real(file, size); }
CUT(ftruncate) CUT(ftruncate64)
#define ONE(name, label) int name(const char *path) { REAL(name); \
    return hit(label, AT_FDCWD, path) ? -1 : real(path); }
ONE(unlink, "unlink") ONE(rmdir, "rmdir")
int unlinkat(int at, const char *path, int flags) {
    REAL(unlinkat);
    return hit(flags ? "rmdir" : "unlink", at, path) ? -1 : real(at, path, flags);
}
int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    return hit("mkdir", AT_FDCWD, path) ? -1 : real(path, mode);
}
int mkdirat(int at, const char *path, mode_t mode) {
    REAL(mkdirat);
    return hit("mkdir", at, path) ? -1 : real(at, path, mode);
}
#define TWO(name, label) int name(const char *from, const char *to) { REAL(name); \
    return hit(label, AT_FDCWD, to) ? -1 : real(from, to); }
TWO(rename, "rename") TWO(link, "link") TWO(symlink, "link")
int renameat(int at, const char *from, int to_at, const char *to) {
    REAL(renameat);
    return hit("rename", to_at, to) ? -1 : real(at, from, to_at, to);
}
