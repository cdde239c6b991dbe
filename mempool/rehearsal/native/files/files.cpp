// Names of the C library, in front of which this library is loaded (LD_PRELOAD), in a program and in all that it starts.

#include <alloca.h>
#include <dlfcn.h>

#include "changes.hpp"

// A function of the C library's name, without the attributes of the C library's declaration.
#define REPLACED(result, name, ...)                                                                  \
  extern "C" __attribute__((visibility("default"))) result files_##name(__VA_ARGS__) __asm__(#name); \
  extern "C" __attribute__((visibility("default"))) result files_##name(__VA_ARGS__)

namespace {

template <class Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

int flags_of(const char* mode) {
  int flags = std::strchr(mode, '+') != nullptr ? O_RDWR : *mode == 'r' ? O_RDONLY : O_WRONLY;
  if (std::strchr(mode, 'e') != nullptr) flags |= O_CLOEXEC;
  return *mode == 'r' ? flags : flags | O_CREAT | (*mode == 'w' ? O_TRUNC : 0) | (std::strchr(mode, 'x') != nullptr ? O_EXCL : 0);
}

FILE* open_stream(const char* path, const char* mode) {
  const int file = open_at(AT_FDCWD, path, flags_of(mode), 0666);
  return file < 0 ? nullptr : fdopen(file, mode);
}

FILE* reopen_stream(const char* path, const char* mode, FILE* stream, const char* name) {
  char place[kPath];
  if (redirect(AT_FDCWD, path, flags_of(mode), 0666, place) != 0) return nullptr;
  return real<FILE* (*)(const char*, const char*, FILE*)>(name)(*place == 0 ? path : place, mode, stream);
}

template <class Entry>
Entry* next_entry(DIR* folder, Entry* (*function)(DIR*)) {
  Entry* entry = function(folder);
  while (entry != nullptr && active() && Found(dirfd(folder), entry->d_name, kNoFollow).gone) entry = function(folder);
  return entry;
}

}  // namespace

// NOLINTBEGIN: names and signatures are the C library's.
// A mode that the caller leaves out is a register that nobody reads, on x86-64 and on AArch64.
#define OPENS(open, openat)                                                                                        \
  REPLACED(int, open, const char* path, int flags, unsigned mode) { return open_at(AT_FDCWD, path, flags, mode); } \
  REPLACED(int, openat, int folder, const char* path, int flags, unsigned mode) { return open_at(folder, path, flags, mode); }
OPENS(open, openat)
OPENS(open64, openat64)
OPENS(__open_2, __openat_2)
OPENS(__open64_2, __openat64_2)
#define CREATES(name) \
  REPLACED(int, name, const char* path, unsigned mode) { return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
CREATES(creat)
CREATES(creat64)

#define STREAMS(open, reopen)                                                                    \
  REPLACED(FILE*, open, const char* path, const char* mode) { return open_stream(path, mode); } \
  REPLACED(FILE*, reopen, const char* path, const char* mode, FILE* stream) { return reopen_stream(path, mode, stream, #reopen); }
STREAMS(fopen, freopen)
STREAMS(fopen64, freopen64)

#define STATES(stat, lstat, fstatat, xstat, lxstat, fxstatat)                                                           \
  REPLACED(int, stat, const char* path, void* into) { return stat_at(AT_FDCWD, path, into, kFollow); }                  \
  REPLACED(int, lstat, const char* path, void* into) { return stat_at(AT_FDCWD, path, into, kNoFollow); }               \
  REPLACED(int, fstatat, int folder, const char* path, void* into, int flags) { return stat_at(folder, path, into, flags); } \
  REPLACED(int, xstat, int, const char* path, void* into) { return stat_at(AT_FDCWD, path, into, kFollow); }            \
  REPLACED(int, lxstat, int, const char* path, void* into) { return stat_at(AT_FDCWD, path, into, kNoFollow); }         \
  REPLACED(int, fxstatat, int, int folder, const char* path, void* into, int flags) { return stat_at(folder, path, into, flags); }
STATES(stat, lstat, fstatat, __xstat, __lxstat, __fxstatat)
STATES(stat64, lstat64, fstatat64, __xstat64, __lxstat64, __fxstatat64)

REPLACED(int, statx, int folder, const char* path, int flags, unsigned mask, struct statx* into) {
  const Readable readable(folder, path, flags);
  return static_cast<int>(syscall(SYS_statx, readable.folder, readable.path, flags, mask, into));
}
REPLACED(int, access, const char* path, int mode) { return access_at(AT_FDCWD, path, mode); }
REPLACED(int, eaccess, const char* path, int mode) { return access_at(AT_FDCWD, path, mode); }
REPLACED(int, euidaccess, const char* path, int mode) { return access_at(AT_FDCWD, path, mode); }
REPLACED(int, faccessat, int folder, const char* path, int mode, int) { return access_at(folder, path, mode); }

REPLACED(int, unlink, const char* path) { return unlink_at(AT_FDCWD, path, 0); }
REPLACED(int, unlinkat, int folder, const char* path, int flags) { return unlink_at(folder, path, flags); }
REPLACED(int, rmdir, const char* path) { return unlink_at(AT_FDCWD, path, AT_REMOVEDIR); }
REPLACED(int, remove, const char* path) {
  const bool folder = Found(AT_FDCWD, path, kNoFollow).mode == S_IFDIR;
  return unlink_at(AT_FDCWD, path, folder ? AT_REMOVEDIR : 0);
}
REPLACED(int, rename, const char* from, const char* into) { return rename_at(AT_FDCWD, from, AT_FDCWD, into, 0); }
REPLACED(int, renameat, int folder, const char* from, int into_folder, const char* into) {
  return rename_at(folder, from, into_folder, into, 0);
}
REPLACED(int, renameat2, int folder, const char* from, int into_folder, const char* into, unsigned flags) {
  return rename_at(folder, from, into_folder, into, flags);
}
REPLACED(int, link, const char* from, const char* into) { return link_at(AT_FDCWD, from, AT_FDCWD, into, 0); }
REPLACED(int, linkat, int folder, const char* from, int into_folder, const char* into, int flags) {
  return link_at(folder, from, into_folder, into, flags);
}
REPLACED(int, symlink, const char* target, const char* path) { return make_link_at(target, AT_FDCWD, path); }
REPLACED(int, symlinkat, const char* target, int folder, const char* path) { return make_link_at(target, folder, path); }
REPLACED(int, mkdir, const char* path, unsigned mode) { return make_folder_at(AT_FDCWD, path, mode); }
REPLACED(int, mkdirat, int folder, const char* path, unsigned mode) { return make_folder_at(folder, path, mode); }
REPLACED(int, truncate, const char* path, long length) { return truncate_path(path, length); }
REPLACED(int, truncate64, const char* path, long length) { return truncate_path(path, length); }

namespace {

int chmod_at(int folder, const char* path, unsigned mode) {
  return change_at(folder, path, 0, [&](int where, const char* name) {
    return name == nullptr ? syscall(SYS_fchmod, where, mode) : syscall(SYS_fchmodat, where, name, mode);
  });
}
int utime_at(int folder, const char* path, const struct timespec* times, int flags) {
  return change_at(folder, path, flags, [&](int where, const char* name) {
    return syscall(SYS_utimensat, where, name, times, name == nullptr ? 0 : flags);
  });
}

}  // namespace

REPLACED(int, chmod, const char* path, unsigned mode) { return chmod_at(AT_FDCWD, path, mode); }
REPLACED(int, fchmod, int file, unsigned mode) { return chmod_at(file, nullptr, mode); }
REPLACED(int, fchmodat, int folder, const char* path, unsigned mode, int flags) {
  return (flags & kNoFollow) != 0 ? fail(ENOTSUP) : chmod_at(folder, path, mode);
}
REPLACED(int, utimensat, int folder, const char* path, const struct timespec* times, int flags) {
  return utime_at(folder, path, times, flags);
}
REPLACED(int, futimens, int file, const struct timespec* times) { return utime_at(file, nullptr, times, 0); }

namespace {

// The environment for another program: with the variables of this library, where the caller's lacks them.
struct Environment {
  char preload[2 * kPath], own[2 * kPath];
  char** entries;

  // `room` is for as many pointers as `given` has, and three more.
  Environment(char* const* given, char** room) {
    char** const first = room;
    const char* others = "";
    entries = const_cast<char**>(given);
    if (!settings().on) return;
    for (char* const* entry = given; entry != nullptr && *entry != nullptr; ++entry) {
      if (std::strncmp(*entry, "MEMPOOL_FILES=", 14) == 0) return;
      if (std::strncmp(*entry, "LD_PRELOAD=", 11) == 0) {
        others = *entry + 11;
      } else {
        *room++ = *entry;
      }
    }
    std::snprintf(preload, sizeof preload, "LD_PRELOAD=%s%s%s", settings().library, *others == 0 ? "" : ":", others);
    std::snprintf(own, sizeof own, "MEMPOOL_FILES=%s", settings().text);
    *room++ = preload;
    *room++ = own;
    *room = nullptr;
    entries = first;
  }
};

}  // namespace

// Starts a program, which may itself have a copy, with the environment.
#define START(call)                                                                                      \
  size_t count = 0;                                                                                      \
  while (given != nullptr && given[count] != nullptr) ++count;                                           \
  const Environment environment(given, static_cast<char**>(alloca((count + 3) * sizeof(char*))));        \
  const Readable readable(AT_FDCWD, path, kFollow);                                                      \
  if (std::strchr(path, '/') != nullptr) path = readable.path;                                           \
  return static_cast<int>(call)

REPLACED(int, execve, const char* path, char* const* words, char* const* given) {
  START(syscall(SYS_execve, path, words, environment.entries));
}
REPLACED(int, execv, const char* path, char* const* words) { return files_execve(path, words, environ); }
REPLACED(int, execvpe, const char* path, char* const* words, char* const* given) {
  START(real<int (*)(const char*, char* const*, char* const*)>("execvpe")(path, words, environment.entries));
}
#define SPAWNS(name)                                                                                                  \
  REPLACED(int, name, pid_t* process, const char* path, void* actions, void* attributes, char* const* words,          \
           char* const* given) {                                                                                      \
    using Function = int (*)(pid_t*, const char*, void*, void*, char* const*, char* const*);                          \
    START(real<Function>(#name)(process, path, actions, attributes, words, environment.entries));                     \
  }
SPAWNS(posix_spawn)
SPAWNS(posix_spawnp)

REPLACED(DIR*, opendir, const char* path) {
  return real<DIR* (*)(const char*)>("opendir")(Readable(AT_FDCWD, path, kFollow).path);
}
REPLACED(dirent*, readdir, DIR* folder) { return next_entry(folder, real<dirent* (*)(DIR*)>("readdir")); }
REPLACED(dirent64*, readdir64, DIR* folder) { return next_entry(folder, real<dirent64* (*)(DIR*)>("readdir64")); }
// NOLINTEND
