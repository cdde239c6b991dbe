// Files from before a rehearsal stay as they are, whichever code of a program's processes wants to change them.
//
// The library is loaded in front of the C library (LD_PRELOAD), in the program and in all that it starts. A file, folder or
// link that is older than the rehearsal is known by device and inode. If a process opens such a file for writing, it gets a
// copy in the rehearsal's folder, as does whoever asks for the file later. If a process removes or renames the file, a mark
// in that folder hides it from then on. New files are made where the program wants them.
//
// Everything here works on the stack and by system calls, so that it may run between fork and exec.

#include <alloca.h>
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#ifndef SYS_faccessat2
#define SYS_faccessat2 439  // on all machines; headers of kernels before 5.8 lack the name
#endif

// A function of the C library's name, without the attributes of the C library's declaration.
#define REPLACED(result, name, ...)                                                 \
  extern "C" __attribute__((visibility("default"))) result files_##name(__VA_ARGS__) __asm__(#name); \
  extern "C" __attribute__((visibility("default"))) result files_##name(__VA_ARGS__)

namespace {

constexpr long long kMostCopied = 1LL << 30;  // bytes of a file that is copied; larger ones are read-only
constexpr size_t kPath = PATH_MAX + 64;
constexpr int kFollow = 0, kNoFollow = AT_SYMLINK_NOFOLLOW;

// Returns a copy of a variable, since a program may change its environment.
const char* variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? nullptr : strdup(value);
}

struct Settings {
  const char* library = variable("LD_PRELOAD");
  const char* folder = variable("MEMPOOL_FILES_FOLDER");
  const char* own_began = variable("MEMPOOL_FILES_BEGAN");
  long long began = own_began != nullptr ? std::atoll(own_began) : 0;  // nanoseconds since the epoch
  const char* exempt = variable("MEMPOOL_FILES_EXEMPT");
};

const Settings& settings() {
  static const Settings found;
  return found;
}

// Restores errno: lookups fail as often as they succeed.
struct KeepErrno {
  int kept = errno;
  ~KeepErrno() { errno = kept; }
};

bool exists(const char* path) { return syscall(SYS_faccessat, AT_FDCWD, path, F_OK) == 0; }

// Returns true once any file is redirected or hidden: before, nothing has to be looked up.
bool active() {
  static bool found = false;
  if (!found && settings().folder != nullptr) {
    const KeepErrno keep;
    found = exists(settings().folder);
  }
  return found;
}

bool is_exempt(const char* path) {
  for (const char* prefix : {"/proc/", "/sys/", "/dev/"}) {
    // Names of open files, as /proc/self/fd/3, lead to files anywhere.
    if (std::strncmp(path, prefix, std::strlen(prefix)) == 0) return std::strstr(path, "/fd/") == nullptr;
  }
  const char* cache = settings().exempt;
  if (cache != nullptr && *cache != 0 && std::strncmp(path, cache, std::strlen(cache)) == 0) return true;
  return std::strstr(path, "__pycache__") != nullptr;
}

// A file, folder or link that a path leads to; `old` if the rehearsal must not change it.
struct Found {
  bool old = false;
  unsigned mode = 0;
  long long size = 0;
  char place[kPath], mark[kPath];  // of its copy, and of the mark that hides it

  Found(int folder, const char* path, int flags) {
    const KeepErrno keep;
    struct statx status;
    if (settings().folder == nullptr || path == nullptr || is_exempt(path)) return;
    if (syscall(SYS_statx, folder, path, flags, STATX_BASIC_STATS | STATX_BTIME, &status) != 0) return;
    mode = status.stx_mode & S_IFMT;
    size = static_cast<long long>(status.stx_size);
    if (mode != S_IFREG && mode != S_IFDIR && mode != S_IFLNK) return;
    const auto before = [](const statx_timestamp& time) {
      return time.tv_sec * 1'000'000'000LL + time.tv_nsec < settings().began;
    };
    old = before(status.stx_ctime) || ((status.stx_mask & STATX_BTIME) != 0 && before(status.stx_btime));
    std::snprintf(place, kPath, "%s/%x-%x-%llx", settings().folder, status.stx_dev_major, status.stx_dev_minor,
                  static_cast<unsigned long long>(status.stx_ino));
    std::snprintf(mark, kPath, "%.*s.gone", static_cast<int>(kPath - 8), place);
  }
  bool is_gone() const {
    const KeepErrno keep;
    return old && active() && exists(mark);
  }
  bool has_copy() const {
    const KeepErrno keep;
    return old && active() && exists(place);
  }
};

int fail(int code) {
  errno = code;
  return -1;
}

void make_folder() { syscall(SYS_mkdirat, AT_FDCWD, settings().folder, 0700); }

// Tells the rehearsal what was kept: "w" for a file that is written elsewhere, "r" for one that was not removed.
void note(char what, int folder, const char* path) {
  const KeepErrno keep;
  char journal[kPath], base[kPath] = "", link[64], line[2 * kPath];
  if (*path != '/') {
    std::snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
    const auto length = syscall(SYS_readlinkat, AT_FDCWD, link, base, kPath - 2);
    base[length > 0 ? length : 0] = 0;
    std::strcat(base, "/");
  }
  std::snprintf(journal, kPath, "%s/journal", settings().folder);
  const int length = std::snprintf(line, sizeof line, "%c%s%s\n", what, base, path);
  const int file = static_cast<int>(syscall(SYS_openat, AT_FDCWD, journal, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600));
  if (file >= 0 && length > 0) syscall(SYS_write, file, line, static_cast<size_t>(length));
  if (file >= 0) syscall(SYS_close, file);
}

void hide(const Found& found, int folder, const char* path) {
  make_folder();
  const auto file = syscall(SYS_openat, AT_FDCWD, found.mark, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  if (file >= 0) syscall(SYS_close, file);
  syscall(SYS_unlinkat, AT_FDCWD, found.place, 0);
  note('r', folder, path);
}

// Copies a file's content into a new file; `flags` say what happens to a file there.
int copy(int folder, const char* from, int into_folder, const char* into, int flags) {
  const int source = static_cast<int>(syscall(SYS_openat, folder, from, O_RDONLY | O_CLOEXEC));
  if (source < 0) return -1;
  struct statx status;
  const bool known = syscall(SYS_statx, source, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &status) == 0;
  const unsigned mode = known ? (status.stx_mode & 0777) | 0200 : 0600;
  const int target = static_cast<int>(syscall(SYS_openat, into_folder, into, O_WRONLY | O_CREAT | O_CLOEXEC | flags, mode));
  char buffer[1 << 14];
  long count = target < 0 ? -1 : 1;
  while (count > 0) {
    count = syscall(SYS_read, source, buffer, sizeof buffer);
    for (long done = 0; done < count;) {
      const long wrote = syscall(SYS_write, target, buffer + done, static_cast<size_t>(count - done));
      if (wrote < 0) count = -1;
      done += wrote;
    }
  }
  const int code = errno;
  syscall(SYS_close, source);
  if (target >= 0) syscall(SYS_close, target);
  return count < 0 ? fail(code) : 0;
}

// Makes the copy of an old file that a process may change, with the content or empty; returns 0, or -1 with errno.
int make_copy(const Found& found, int folder, const char* path, bool content) {
  if (found.has_copy() && !found.is_gone()) return 0;
  if (syscall(SYS_faccessat, folder, path, W_OK) != 0) return -1;
  content = content && !found.is_gone();
  if (content && found.size > kMostCopied) return fail(EROFS);
  make_folder();
  char fresh[kPath + 32];
  std::snprintf(fresh, sizeof fresh, "%s.%ld", found.place, syscall(SYS_gettid));
  if (copy(content ? folder : AT_FDCWD, content ? path : "/dev/null", AT_FDCWD, fresh, O_TRUNC) != 0) return -1;
  // Another process may have made the copy meanwhile, and written to it.
  if (syscall(SYS_linkat, AT_FDCWD, fresh, AT_FDCWD, found.place, 0) == 0) note('w', folder, path);
  syscall(SYS_unlinkat, AT_FDCWD, fresh, 0);
  syscall(SYS_unlinkat, AT_FDCWD, found.mark, 0);
  return 0;
}

// A path to read from: the given one, that of a copy, or none where the file is hidden.
struct Readable {
  int folder;
  const char* path;
  char place[kPath];

  Readable(int given_folder, const char* given, int flags) : folder(given_folder), path(given) {
    if (!active() || given == nullptr || *given == 0) return;
    const Found found(given_folder, given, flags & (kNoFollow | AT_EMPTY_PATH));
    if (found.is_gone()) {
      path = nullptr;
    } else if (found.has_copy()) {
      std::memcpy(place, found.place, kPath);
      folder = AT_FDCWD;
      path = place;
    }
  }
  bool is_hidden(const char* given) const { return path == nullptr && given != nullptr; }
};

bool writes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC) != 0; }

// Redirects an old file that is opened; returns false with errno if that must fail. `place` is empty for other files.
bool redirect(int folder, const char* path, int flags, char* place) {
  *place = 0;
  if (settings().folder == nullptr || (flags & O_PATH) != 0 || (!writes(flags) && !active())) return true;
  const Found found(folder, path, (flags & O_NOFOLLOW) != 0 ? kNoFollow : kFollow);
  if (!found.old || (found.mode != S_IFREG && !found.is_gone())) return true;
  const bool gone = found.is_gone();
  if (gone && ((flags & O_CREAT) == 0 || found.mode != S_IFREG)) return fail(ENOENT) == 0;
  if (!gone && (flags & O_CREAT) != 0 && (flags & O_EXCL) != 0) return fail(EEXIST) == 0;
  if (writes(flags) || gone) {
    if (make_copy(found, folder, path, (flags & O_TRUNC) == 0) != 0) return false;
  } else if (!found.has_copy()) {
    return true;
  }
  std::memcpy(place, found.place, kPath);
  return true;
}

int open_at(int folder, const char* path, int flags, unsigned mode) {
  char place[kPath];
  if (!redirect(folder, path, flags, place)) return -1;
  if (*place == 0) return static_cast<int>(syscall(SYS_openat, folder, path, flags, mode));
  return static_cast<int>(syscall(SYS_openat, AT_FDCWD, place, flags & ~(O_CREAT | O_EXCL | O_NOFOLLOW), mode));
}

// Returns true if all in an old folder is hidden.
bool is_emptied(int folder, const char* path) {
  const int file = static_cast<int>(syscall(SYS_openat, folder, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (file < 0) return false;
  bool empty = true;
  char buffer[1 << 13];
  long count = 0;
  while (empty && (count = syscall(SYS_getdents64, file, buffer, sizeof buffer)) > 0) {
    for (long at = 0; at < count;) {
      const auto* entry = reinterpret_cast<const dirent64*>(buffer + at);
      const char* name = entry->d_name;
      if (std::strcmp(name, ".") != 0 && std::strcmp(name, "..") != 0) empty &= Found(file, name, kNoFollow).is_gone();
      at += entry->d_reclen;
    }
  }
  syscall(SYS_close, file);
  return empty;
}

int unlink_at(int folder, const char* path, int flags) {
  const Found found(folder, path, kNoFollow);
  if (!found.old) return static_cast<int>(syscall(SYS_unlinkat, folder, path, flags));
  const bool is_folder = found.mode == S_IFDIR;
  if (found.is_gone()) return fail(ENOENT);
  if (is_folder != ((flags & AT_REMOVEDIR) != 0)) return fail(is_folder ? EISDIR : ENOTDIR);
  if (is_folder && !is_emptied(folder, path)) return fail(ENOTEMPTY);
  hide(found, folder, path);
  return 0;
}

int rename_at(int folder, const char* from, int into_folder, const char* into, unsigned flags);

// Renames what is in a folder one by one, and removes the folder. The target is new, or an old folder that is hidden.
int move_entries(int folder, const char* from, int into_folder, const char* into, const Found& target) {
  if (!target.old && syscall(SYS_mkdirat, into_folder, into, 0777) != 0) return -1;
  if (target.old) syscall(SYS_unlinkat, AT_FDCWD, target.mark, 0);
  const int source = static_cast<int>(syscall(SYS_openat, folder, from, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const int kept = static_cast<int>(syscall(SYS_openat, into_folder, into, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  char buffer[1 << 13];
  long count = source < 0 || kept < 0 ? -1 : 1;
  while (count > 0 && (count = syscall(SYS_getdents64, source, buffer, sizeof buffer)) > 0) {
    for (long at = 0; at < count && count > 0;) {
      const auto* entry = reinterpret_cast<const dirent64*>(buffer + at);
      const char* name = entry->d_name;
      at += entry->d_reclen;
      if (std::strcmp(name, ".") == 0 || std::strcmp(name, "..") == 0) continue;
      if (rename_at(source, name, kept, name, 0) != 0) count = -1;
    }
  }
  const int code = errno;
  if (source >= 0) syscall(SYS_close, source);
  if (kept >= 0) syscall(SYS_close, kept);
  return count < 0 ? fail(code) : unlink_at(folder, from, AT_REMOVEDIR);
}

int move_link(int folder, const char* from, int into_folder, const char* into) {
  char target[kPath];
  const long length = syscall(SYS_readlinkat, folder, from, target, kPath - 1);
  if (length < 0) return -1;
  target[length] = 0;
  return syscall(SYS_symlinkat, target, into_folder, into) != 0 ? -1 : unlink_at(folder, from, 0);
}

int rename_at(int folder, const char* from, int into_folder, const char* into, unsigned flags) {
  const Found source(folder, from, kNoFollow), target(into_folder, into, kNoFollow);
  if (!source.old && !target.old) return static_cast<int>(syscall(SYS_renameat2, folder, from, into_folder, into, flags));
  if (source.is_gone()) return fail(ENOENT);
  if (source.mode == 0 && syscall(SYS_faccessat, folder, from, F_OK) != 0) return -1;
  if ((flags & RENAME_EXCHANGE) != 0) return fail(EXDEV);
  if ((flags & RENAME_NOREPLACE) != 0 && target.old && !target.is_gone()) return fail(EEXIST);
  if (source.mode == S_IFDIR && (target.mode == 0 || (target.mode == S_IFDIR && target.is_gone()))) {
    return move_entries(folder, from, into_folder, into, target);
  }
  if (source.mode == S_IFLNK && target.mode == 0) return move_link(folder, from, into_folder, into);
  if (source.mode == S_IFLNK && target.old && target.mode == S_IFLNK) {  // the old one stays
    if (target.is_gone()) syscall(SYS_unlinkat, AT_FDCWD, target.mark, 0);
    return unlink_at(folder, from, 0);
  }
  // A program that gets this answer copies, and removes the source.
  static long long copied = 0;
  copied += source.old && !source.has_copy() ? source.size : 0;
  if (source.mode != S_IFREG || (target.old && target.mode != S_IFREG) || copied > kMostCopied) return fail(EXDEV);
  if (source.old && target.old && std::strcmp(source.place, target.place) == 0) return 0;
  const Readable readable(folder, from, kNoFollow);
  make_folder();
  if (copy(readable.folder, readable.path, target.old ? AT_FDCWD : into_folder, target.old ? target.place : into, O_TRUNC) != 0) {
    return -1;
  }
  if (target.old) {
    syscall(SYS_unlinkat, AT_FDCWD, target.mark, 0);
    note('w', into_folder, into);
  }
  if (source.old) {
    hide(source, folder, from);
    return 0;
  }
  return static_cast<int>(syscall(SYS_unlinkat, folder, from, 0));
}

int link_at(int folder, const char* from, int into_folder, const char* into, int flags) {
  const Found source(folder, from, (flags & AT_SYMLINK_FOLLOW) != 0 ? kFollow : kNoFollow);
  if (!source.old) return static_cast<int>(syscall(SYS_linkat, folder, from, into_folder, into, flags));
  if (source.is_gone()) return fail(ENOENT);
  if (source.mode != S_IFREG || source.size > kMostCopied) return fail(EXDEV);
  const Readable readable(folder, from, kFollow);
  return copy(readable.folder, readable.path, into_folder, into, O_EXCL);
}

int stat_at(int folder, const char* path, void* into, int flags) {
  const Readable readable(folder, path, flags);
  if (readable.is_hidden(path)) return fail(ENOENT);
  return static_cast<int>(syscall(SYS_newfstatat, readable.folder, readable.path, into, flags));
}

int access_at(int folder, const char* path, int mode, int flags) {
  const Readable readable(folder, path, flags);
  if (readable.is_hidden(path)) return fail(ENOENT);
  if (flags != 0 && syscall(SYS_faccessat2, readable.folder, readable.path, mode, flags) == 0) return 0;
  if (flags != 0 && errno != ENOSYS) return -1;  // as kernels before 5.8 answer
  return static_cast<int>(syscall(SYS_faccessat, readable.folder, readable.path, mode));
}

// Changes mode, owner or times: of a copy, and of new files; those of old files stay.
template <class Change>
int change_at(int folder, const char* path, int flags, Change change) {
  const Found found(folder, path == nullptr ? "" : path, path == nullptr ? AT_EMPTY_PATH : flags & kNoFollow);
  if (!found.old) return static_cast<int>(change(folder, path));
  if (found.is_gone()) return fail(ENOENT);
  return found.has_copy() ? static_cast<int>(change(AT_FDCWD, found.place)) : 0;
}

int mkdir_at(int folder, const char* path, unsigned mode) {
  const Found found(folder, path, kNoFollow);
  if (found.mode != S_IFDIR || !found.is_gone()) return static_cast<int>(syscall(SYS_mkdirat, folder, path, mode));
  return static_cast<int>(syscall(SYS_unlinkat, AT_FDCWD, found.mark, 0));
}

// A link in the place of an old one that is hidden is not made: the old one is there again.
int symlink_at(const char* target, int folder, const char* path) {
  const Found found(folder, path, kNoFollow);
  if (found.mode != S_IFLNK || !found.is_gone()) return static_cast<int>(syscall(SYS_symlinkat, target, folder, path));
  return static_cast<int>(syscall(SYS_unlinkat, AT_FDCWD, found.mark, 0));
}

int truncate_path(const char* path, long length) {
  const Found found(AT_FDCWD, path, kFollow);
  if (!found.old) return static_cast<int>(syscall(SYS_truncate, path, length));
  if (make_copy(found, AT_FDCWD, path, true) != 0) return -1;
  return static_cast<int>(syscall(SYS_truncate, found.place, length));
}

template <class Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

// Returns the path to give to the C library's function, or null with errno.
const char* stream_path(const char* path, const char* mode, char* place) {
  const bool update = std::strchr(mode, '+') != nullptr;
  int flags = update ? O_RDWR : *mode == 'r' ? O_RDONLY : O_WRONLY;
  flags |= *mode == 'r' ? 0 : O_CREAT | (*mode == 'w' ? O_TRUNC : 0) | (std::strchr(mode, 'x') != nullptr ? O_EXCL : 0);
  if (path == nullptr) return nullptr;
  if (!redirect(AT_FDCWD, path, flags, place)) return nullptr;
  return *place == 0 ? path : place;
}

FILE* open_stream(const char* path, const char* mode, const char* name) {
  char place[kPath];
  const char* given = stream_path(path, mode, place);
  return given == nullptr ? nullptr : real<FILE* (*)(const char*, const char*)>(name)(given, mode);
}

FILE* reopen_stream(const char* path, const char* mode, FILE* stream, const char* name) {
  char place[kPath];
  const char* given = path == nullptr ? nullptr : stream_path(path, mode, place);
  if (given == nullptr && path != nullptr) return nullptr;
  return real<FILE* (*)(const char*, const char*, FILE*)>(name)(given, mode, stream);
}

template <class Entry>
Entry* next_entry(DIR* folder, Entry* (*function)(DIR*)) {
  Entry* entry = function(folder);
  while (entry != nullptr && active() && Found(dirfd(folder), entry->d_name, kNoFollow).is_gone()) entry = function(folder);
  return entry;
}

unsigned mode_of(int flags, va_list arguments) {
  return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(arguments, unsigned) : 0;
}

}  // namespace

// NOLINTBEGIN: names and signatures are the C library's.
#define OPENS(name, folder_parameter, folder)                                \
  REPLACED(int, name, folder_parameter const char* path, int flags, ...) {   \
    va_list arguments;                                                       \
    va_start(arguments, flags);                                              \
    const unsigned mode = mode_of(flags, arguments);                         \
    va_end(arguments);                                                       \
    return open_at(folder, path, flags, mode);                               \
  }
#define NOTHING
#define FOLDER int folder,
OPENS(open, NOTHING, AT_FDCWD)
OPENS(open64, NOTHING, AT_FDCWD)
OPENS(__open_2, NOTHING, AT_FDCWD)
OPENS(__open64_2, NOTHING, AT_FDCWD)
OPENS(openat, FOLDER, folder)
OPENS(openat64, FOLDER, folder)
OPENS(__openat_2, FOLDER, folder)
OPENS(__openat64_2, FOLDER, folder)
#define CREATES(name) \
  REPLACED(int, name, const char* path, unsigned mode) { return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
CREATES(creat)
CREATES(creat64)

#define STREAMS(open, reopen)                                                                                  \
  REPLACED(FILE*, open, const char* path, const char* mode) { return open_stream(path, mode, #open); }          \
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
  if (readable.is_hidden(path)) return fail(ENOENT);
  return static_cast<int>(syscall(SYS_statx, readable.folder, readable.path, flags, mask, into));
}
REPLACED(int, access, const char* path, int mode) { return access_at(AT_FDCWD, path, mode, 0); }
REPLACED(int, eaccess, const char* path, int mode) { return access_at(AT_FDCWD, path, mode, AT_EACCESS); }
REPLACED(int, euidaccess, const char* path, int mode) { return access_at(AT_FDCWD, path, mode, AT_EACCESS); }
REPLACED(int, faccessat, int folder, const char* path, int mode, int flags) { return access_at(folder, path, mode, flags); }

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
REPLACED(int, symlink, const char* target, const char* path) { return symlink_at(target, AT_FDCWD, path); }
REPLACED(int, symlinkat, const char* target, int folder, const char* path) { return symlink_at(target, folder, path); }
REPLACED(int, mkdir, const char* path, unsigned mode) { return mkdir_at(AT_FDCWD, path, mode); }
REPLACED(int, mkdirat, int folder, const char* path, unsigned mode) { return mkdir_at(folder, path, mode); }
REPLACED(int, truncate, const char* path, long length) { return truncate_path(path, length); }
REPLACED(int, truncate64, const char* path, long length) { return truncate_path(path, length); }

namespace {

int chmod_at(int folder, const char* path, unsigned mode, int flags) {
  return change_at(folder, path, flags, [&](int where, const char* name) {
    return name == nullptr ? syscall(SYS_fchmod, where, mode) : syscall(SYS_fchmodat, where, name, mode);
  });
}
int chown_at(int folder, const char* path, unsigned user, unsigned group, int flags) {
  return change_at(folder, path, flags, [&](int where, const char* name) {
    return name == nullptr ? syscall(SYS_fchown, where, user, group) : syscall(SYS_fchownat, where, name, user, group, flags);
  });
}
int utime_at(int folder, const char* path, const struct timespec* times, int flags) {
  return change_at(folder, path, flags, [&](int where, const char* name) {
    return syscall(SYS_utimensat, where, name, times, name == nullptr ? 0 : flags);
  });
}
// Sets times in seconds and microseconds.
int utimes_at(int folder, const char* path, const struct timeval* times, int flags) {
  struct timespec exact[2];
  for (int k = 0; times != nullptr && k < 2; ++k) exact[k] = {times[k].tv_sec, times[k].tv_usec * 1000};
  return utime_at(folder, path, times == nullptr ? nullptr : exact, flags);
}
int setxattr_at(const char* path, const char* name, const void* value, size_t size, int flags, int follow) {
  return change_at(AT_FDCWD, path, follow, [&](int, const char* where) {
    return syscall(follow == kFollow ? SYS_setxattr : SYS_lsetxattr, where, name, value, size, flags);
  });
}

}  // namespace

REPLACED(int, chmod, const char* path, unsigned mode) { return chmod_at(AT_FDCWD, path, mode, 0); }
REPLACED(int, fchmod, int file, unsigned mode) { return chmod_at(file, nullptr, mode, 0); }
REPLACED(int, fchmodat, int folder, const char* path, unsigned mode, int flags) {
  return (flags & kNoFollow) != 0 ? fail(ENOTSUP) : chmod_at(folder, path, mode, flags);
}
REPLACED(int, chown, const char* path, unsigned user, unsigned group) { return chown_at(AT_FDCWD, path, user, group, 0); }
REPLACED(int, lchown, const char* path, unsigned user, unsigned group) {
  return chown_at(AT_FDCWD, path, user, group, kNoFollow);
}
REPLACED(int, fchown, int file, unsigned user, unsigned group) { return chown_at(file, nullptr, user, group, 0); }
REPLACED(int, fchownat, int folder, const char* path, unsigned user, unsigned group, int flags) {
  return chown_at(folder, path, user, group, flags);
}
REPLACED(int, utimensat, int folder, const char* path, const struct timespec* times, int flags) {
  return utime_at(folder, path, times, flags);
}
REPLACED(int, futimens, int file, const struct timespec* times) { return utime_at(file, nullptr, times, 0); }
REPLACED(int, utimes, const char* path, const struct timeval* times) { return utimes_at(AT_FDCWD, path, times, 0); }
REPLACED(int, lutimes, const char* path, const struct timeval* times) { return utimes_at(AT_FDCWD, path, times, kNoFollow); }
REPLACED(int, futimes, int file, const struct timeval* times) { return utimes_at(file, nullptr, times, 0); }
REPLACED(int, futimesat, int folder, const char* path, const struct timeval* times) { return utimes_at(folder, path, times, 0); }
REPLACED(int, utime, const char* path, const long* seconds) {
  const struct timeval times[2] = {{seconds != nullptr ? seconds[0] : 0, 0}, {seconds != nullptr ? seconds[1] : 0, 0}};
  return utimes_at(AT_FDCWD, path, seconds == nullptr ? nullptr : times, 0);
}
REPLACED(int, setxattr, const char* path, const char* name, const void* value, size_t size, int flags) {
  return setxattr_at(path, name, value, size, flags, kFollow);
}
REPLACED(int, lsetxattr, const char* path, const char* name, const void* value, size_t size, int flags) {
  return setxattr_at(path, name, value, size, flags, kNoFollow);
}

namespace {

// The environment for another program: with the variables of this library, where the caller's lacks them.
struct Environment {
  char added[4][2 * kPath];
  char** entries;

  // `room` is for as many pointers as `given` has, and five more.
  Environment(char* const* given, char** room) : entries(room) {
    int count = 0;
    const char* preload = "";
    for (char* const* entry = given; entry != nullptr && *entry != nullptr; ++entry) {
      if (std::strncmp(*entry, "MEMPOOL_FILES_FOLDER=", 21) == 0) {
        entries = const_cast<char**>(given);
        return;
      }
      if (std::strncmp(*entry, "LD_PRELOAD=", 11) == 0) {
        preload = *entry + 11;
      } else {
        room[count++] = *entry;
      }
    }
    const auto& kept = settings();
    const char* const names[] = {"LD_PRELOAD", "MEMPOOL_FILES_FOLDER", "MEMPOOL_FILES_BEGAN", "MEMPOOL_FILES_EXEMPT"};
    const char* const values[] = {kept.library, kept.folder, kept.own_began, kept.exempt};
    for (int k = 0; k < 4; ++k) {
      if (kept.folder == nullptr || values[k] == nullptr) continue;
      const bool joined = k == 0 && *preload != 0;
      std::snprintf(added[k], sizeof added[k], "%s=%s%s%s", names[k], values[k], joined ? ":" : "", joined ? preload : "");
      room[count++] = added[k];
    }
    room[count] = nullptr;
  }
};

size_t length_of(char* const* given) {
  size_t count = 0;
  while (given != nullptr && given[count] != nullptr) ++count;
  return count;
}

}  // namespace

#define WITH_ENVIRONMENT                                                                     \
  char** const room = static_cast<char**>(alloca((length_of(given) + 5) * sizeof(char*)));   \
  const Environment environment(given, room)

REPLACED(int, execve, const char* path, char* const* words, char* const* given) {
  WITH_ENVIRONMENT;
  return static_cast<int>(syscall(SYS_execve, path, words, environment.entries));
}
REPLACED(int, execvpe, const char* path, char* const* words, char* const* given) {
  WITH_ENVIRONMENT;
  return real<int (*)(const char*, char* const*, char* const*)>("execvpe")(path, words, environment.entries);
}
#define SPAWNS(name)                                                                                                  \
  REPLACED(int, name, pid_t* process, const char* path, void* actions, void* attributes, char* const* words,          \
           char* const* given) {                                                                                      \
    using Function = int (*)(pid_t*, const char*, void*, void*, char* const*, char* const*);                          \
    WITH_ENVIRONMENT;                                                                                                 \
    return real<Function>(#name)(process, path, actions, attributes, words, environment.entries);                     \
  }
SPAWNS(posix_spawn)
SPAWNS(posix_spawnp)

REPLACED(DIR*, opendir, const char* path) {
  if (Readable(AT_FDCWD, path, kFollow).is_hidden(path)) {
    errno = ENOENT;
    return nullptr;
  }
  return real<DIR* (*)(const char*)>("opendir")(path);
}
REPLACED(dirent*, readdir, DIR* folder) { return next_entry(folder, real<dirent* (*)(DIR*)>("readdir")); }
REPLACED(dirent64*, readdir64, DIR* folder) { return next_entry(folder, real<dirent64* (*)(DIR*)>("readdir64")); }
// NOLINTEND
