// The files that a rehearsal keeps as they are: how they are known, where their content is, and which were changed.
//
// Two kinds of files have a copy in the rehearsal's folder, named for their device and inode, which all processes of the
// program read and write in their stead. Files that are older than the rehearsal keep their content. New files in the
// program's folder, and new checkpoints anywhere, exist in their place, but empty: so folders list them, and they are renamed,
// linked and removed as others. A journal lists them for the end.
//
// Everything here works on the stack and by system calls, so that it may run between fork and exec.

#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace {

constexpr size_t kPath = PATH_MAX + 64;
constexpr int kFollow = 0, kNoFollow = AT_SYMLINK_NOFOLLOW;

// The settings of the process that was started first, since a program may change its environment.
struct Settings {
  const char* library = copy_of("LD_PRELOAD");
  const char* text = copy_of("MEMPOOL_FILES");  // a line for each of the following
  char* folder = nullptr;    // of the copies
  long long began = 0;       // nanoseconds since the epoch
  char* cache = nullptr;     // folder in which all is written
  char* cleared = nullptr;   // folder in which all new files stay empty
  const bool on = text != nullptr && std::sscanf(text, "%m[^\n] %lld %m[^\n] %m[^\n]", &folder, &began, &cache, &cleared) == 4;

  static const char* copy_of(const char* name) {
    const char* const value = std::getenv(name);
    return value == nullptr ? nullptr : strdup(value);
  }
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

int fail(int code) {
  errno = code;
  return -1;
}

int open_raw(int folder, const char* path, int flags, unsigned mode = 0) {
  return static_cast<int>(syscall(SYS_openat, folder, path, flags | O_CLOEXEC, mode));
}

// Closes a file at the end of a block.
struct Closing {
  int file;
  ~Closing() {
    const KeepErrno keep;
    if (file >= 0) syscall(SYS_close, file);
  }
};

void erase(const char* path) {
  const KeepErrno keep;
  syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}

// Returns true once any file has a copy or is hidden: before, nothing has to be looked up.
bool active() {
  static bool found = false;
  const KeepErrno keep;
  return found || (found = settings().on && syscall(SYS_faccessat, AT_FDCWD, settings().folder, F_OK) == 0);
}

bool is_below(const char* path, const char* folder) {
  const size_t length = std::strlen(folder);
  return length > 0 && std::strncmp(path, folder, length) == 0 && (folder[length - 1] == '/' || path[length] == '/');
}

bool is_exempt(const char* path) {
  for (const char* folder : {"/proc", "/sys", "/dev"}) {
    // Names of open files, as /proc/self/fd/3, lead to files anywhere.
    if (is_below(path, folder)) return std::strstr(path, "/fd/") == nullptr;
  }
  return is_below(path, settings().cache) || std::strstr(path, "__pycache__") != nullptr;
}

// A file, folder or link that a path leads to; `old` if the rehearsal must not change it. Its copy is at `place`, where a link
// to nothing hides an old one.
struct Found {
  bool old = false, gone = false, copied = false;
  unsigned mode = 0, permissions = 0, links = 0;
  long long size = 0;
  char place[kPath];

  Found(int folder, const char* path, int flags) {
    const KeepErrno keep;
    struct statx status;
    *place = 0;
    if (!settings().on || path == nullptr || is_exempt(path)) return;
    if (syscall(SYS_statx, folder, path, flags, STATX_BASIC_STATS | STATX_BTIME, &status) != 0) return;
    mode = status.stx_mode & S_IFMT;
    permissions = status.stx_mode & 0777;
    links = status.stx_nlink;
    size = static_cast<long long>(status.stx_size);
    if (mode != S_IFREG && mode != S_IFDIR && mode != S_IFLNK) return;
    const auto before = [](const statx_timestamp& time) {
      return time.tv_sec * 1'000'000'000LL + time.tv_nsec < settings().began;
    };
    old = before(status.stx_ctime) || ((status.stx_mask & STATX_BTIME) != 0 && before(status.stx_btime));
    // With the time of birth, as another file may get the inode of a removed one.
    const unsigned birth = (status.stx_mask & STATX_BTIME) != 0 ? status.stx_btime.tv_sec ^ status.stx_btime.tv_nsec : 0;
    std::snprintf(place, kPath, "%s/%x-%x-%llx-%x", settings().folder, status.stx_dev_major, status.stx_dev_minor,
                  static_cast<unsigned long long>(status.stx_ino), birth);
    if (!active() || syscall(SYS_statx, AT_FDCWD, place, kNoFollow, STATX_TYPE, &status) != 0) return;
    gone = (status.stx_mode & S_IFMT) == S_IFLNK;
    copied = !gone && mode == S_IFREG;
  }
};

// A path to read from: the given one, that of a copy, or none at all where the file is hidden.
struct Readable {
  int folder;
  const char* path;
  char place[kPath];

  Readable(int given_folder, const char* given, int flags) : folder(given_folder), path(given) {
    if (!active() || given == nullptr || *given == 0) return;
    const Found found(given_folder, given, flags & (kNoFollow | AT_EMPTY_PATH));
    if (!found.gone && !found.copied) return;
    std::snprintf(place, kPath, "%s", found.gone ? "/proc/self/gone" : found.place);
    folder = AT_FDCWD;
    path = place;
  }
};

// --- names

// Writes the path of an open file, without links in it, or nothing.
void path_of(int file, char* into) {
  char link[64];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const auto length = syscall(SYS_readlinkat, AT_FDCWD, link, into, kPath - 1);
  into[length > 0 ? length : 0] = 0;
}

void path_of(int folder, const char* path, int flags, char* into) {
  const KeepErrno keep;
  const Closing file{open_raw(folder, path, O_PATH | flags)};
  path_of(file.file, into);
}

// Returns true if a part of a file's name is one of these: model.pt, model.pth.tar, .model.ckpt.4.
bool has_suffix(const char* path, std::initializer_list<const char*> suffixes) {
  const char* const slash = std::strrchr(path, '/');
  for (const char* dot = std::strchr(slash == nullptr ? path : slash, '.'); dot != nullptr; dot = std::strchr(dot + 1, '.')) {
    for (const char* suffix : suffixes) {
      const size_t length = std::strlen(suffix);
      if (std::strncmp(dot, suffix, length) == 0 && (dot[length] == 0 || dot[length] == '.')) return true;
    }
  }
  return false;
}

// Returns true if a new file, folder or link lies in the program's folder. Not so caches in hidden folders that
// are older, the rehearsal's own files, and shared libraries, which the dynamic linker reads by itself.
bool is_cleared(int folder, const char* path) {
  if (!settings().on) return false;
  const char* const slash = std::strrchr(path, '/');
  char parent[kPath] = ".", whole[kPath];
  if (slash != nullptr) std::snprintf(parent, kPath, "%.*s", static_cast<int>(slash - path) + 1, path);
  path_of(folder, parent, 0, whole);
  const size_t used = std::strlen(whole), own = static_cast<size_t>(std::strrchr(settings().folder, '/') - settings().folder);
  std::snprintf(whole + used, kPath - used, "/%s", slash == nullptr ? path : slash + 1);
  if (!is_below(whole, settings().cleared) || std::strncmp(whole, settings().folder, own) == 0) return false;
  if (is_exempt(whole) || has_suffix(whole, {".so"})) return false;
  for (const char* hidden = whole + std::strlen(settings().cleared) - 1; (hidden = std::strstr(hidden, "/.")) != nullptr;) {
    if ((hidden = std::strchr(hidden + 1, '/')) == nullptr) break;
    std::snprintf(parent, kPath, "%.*s", static_cast<int>(hidden - whole), whole);
    if (Found(AT_FDCWD, parent, kNoFollow).old) return false;
  }
  return true;
}

// Returns true if a new file's content goes to the rehearsal's folder.
bool is_redirected(int folder, const char* path) {
  return settings().on && !is_exempt(path) &&
         (has_suffix(path, {".pt", ".pth", ".ckpt", ".bin", ".safetensors"}) || is_cleared(folder, path));
}

// --- the journal

void make_folder() {
  const KeepErrno keep;
  syscall(SYS_mkdirat, AT_FDCWD, settings().folder, 0700);
}

// Tells the rehearsal of a change: "written" or "removed" of an older file, "made" with the device and inode, or "renamed".
void note(const char* kind, const char* what, const char* path) {
  const KeepErrno keep;
  char journal[kPath], line[2 * kPath];
  make_folder();
  std::snprintf(journal, kPath, "%s/journal", settings().folder);
  const int length = std::snprintf(line, sizeof line, "%s%c%s%c%s%c", kind, 0, what, 0, path, 0);
  const Closing file{open_raw(AT_FDCWD, journal, O_WRONLY | O_APPEND | O_CREAT, 0600)};
  if (length > 0) syscall(SYS_write, file.file, line, static_cast<size_t>(length));
}

void note_made(const Found& made, const char* path) { note("made", std::strrchr(made.place, '/') + 1, path); }

void note_made(int folder, const char* path) {
  char name[kPath];
  path_of(folder, path, O_NOFOLLOW, name);
  note_made(Found(folder, path, kNoFollow), name);
}

}  // namespace
