// Changes of files, as a process asks for them: of copies where files are kept, of the files themselves else.
//
// The functions have the signatures and answers of system calls.

#pragma once

#include <dirent.h>

#include "lookup.hpp"

namespace {

constexpr int kMostTries = 100;  // to open a file that other processes replace
constexpr long long kMostCopied = 1LL << 30;  // bytes of a file that is copied; larger ones are read-only

// --- copies

int copy_content(int source, int target) {
  long count = source < 0 || target < 0 ? -1 : 1;
  while (count > 0) count = syscall(SYS_sendfile, target, source, nullptr, 1 << 20);
  return static_cast<int>(count);
}

// Makes the copy of an old file that a process may change, with the content or empty.
int make_copy(const Found& found, int folder, const char* path, bool content) {
  if (found.copied) return 0;
  content = content && !found.gone;
  if (content && found.size > kMostCopied) return fail(EROFS);
  make_folder();
  char fresh[kPath + 32], name[kPath];
  std::snprintf(fresh, sizeof fresh, "%s.%ld", found.place, syscall(SYS_gettid));
  const Closing source{open_raw(folder, path, content ? O_RDONLY : O_PATH)};
  const Closing target{open_raw(AT_FDCWD, fresh, O_WRONLY | O_CREAT | O_TRUNC, found.permissions | 0200)};
  if (target.file < 0 || (content && copy_content(source.file, target.file) != 0)) return -1;
  if (found.gone) erase(found.place);
  path_of(source.file, name);
  // Another process may have made the copy meanwhile, and written to it.
  if (syscall(SYS_linkat, AT_FDCWD, fresh, AT_FDCWD, found.place, 0) == 0) note("written", "", name);
  erase(fresh);
  return 0;
}

// Moves the content of a new file to the rehearsal's folder, or drops it if it is too large, and leaves the file empty.
int empty(int file) {
  const Found made(file, "", AT_EMPTY_PATH);
  char name[kPath];
  path_of(file, name);
  note_made(made, name);
  const Closing place{open_raw(AT_FDCWD, made.place, O_WRONLY | O_CREAT, made.permissions | 0200)};
  if (place.file < 0 || (made.size <= kMostCopied && copy_content(file, place.file) != 0)) return -1;
  return static_cast<int>(syscall(SYS_ftruncate, file, 0));
}

// Empties a new file before it gets the name of a file that is redirected.
void empty_for(const Found& source, int folder, const char* path, int into_folder, const char* into) {
  if (source.old || source.mode != S_IFREG || source.copied || !is_redirected(into_folder, into)) return;
  const KeepErrno keep;
  const Closing file{open_raw(folder, path, O_RDWR)};
  if (file.file >= 0) empty(file.file);
}

bool writes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC) != 0; }

// Finds the copy of a file that is opened, and makes it if need be; `place` is empty for other files.
int redirect(int folder, const char* path, int flags, unsigned mode, char* place) {
  *place = 0;
  const bool makes = (flags & O_CREAT) != 0;
  if (path == nullptr || (flags & O_PATH) != 0 || (!makes && !writes(flags) && !active())) return 0;
  const int follow = (flags & O_NOFOLLOW) != 0 ? kNoFollow : kFollow;
  Found found(folder, path, follow);
  // An empty file may be one that another process is about to empty here.
  const bool fresh = found.mode == 0 || (found.mode == S_IFREG && !found.old && !found.copied && found.size == 0);
  if (fresh && makes && is_redirected(folder, path)) {
    const Closing file{open_raw(folder, path, O_RDWR | (flags & (O_CREAT | O_EXCL | O_NOFOLLOW)), mode)};
    if (file.file < 0 || empty(file.file) != 0) return -1;
    flags &= ~O_EXCL;
    found = Found(folder, path, follow);
  }
  if (found.gone && (!makes || found.mode != S_IFREG)) return fail(ENOENT);
  if (found.mode != S_IFREG || !(found.old || found.copied)) return 0;
  if (!found.gone && makes && (flags & O_EXCL) != 0) return fail(EEXIST);
  if (!found.copied) {
    if (!writes(flags) && !found.gone) return 0;
    if (syscall(SYS_faccessat, folder, path, W_OK) != 0) return -1;
    if (make_copy(found, folder, path, (flags & O_TRUNC) == 0) != 0) return -1;
  }
  std::memcpy(place, found.place, kPath);
  return 0;
}

int open_at(int folder, const char* path, int flags, unsigned mode) {
  char place[kPath];
  for (int tries = 0;; ++tries) {
    if (redirect(folder, path, flags, mode, place) != 0) return -1;
    const bool copied = *place != 0;
    const auto file = copied ? syscall(SYS_openat, AT_FDCWD, place, flags & ~(O_CREAT | O_EXCL | O_NOFOLLOW))
                             : syscall(SYS_openat, folder, path, flags, mode);
    // Meanwhile another process may have removed the file, or given its name to another one.
    const bool again = copied ? file < 0 && errno == ENOENT
                              : file >= 0 && active() && Found(static_cast<int>(file), "", AT_EMPTY_PATH).copied;
    if (!again || (flags & O_PATH) != 0 || tries == kMostTries) return static_cast<int>(file);
    if (file >= 0) syscall(SYS_close, file);
  }
}

// Copies what a path is read from to another path.
int copy_to(const Found& source, int folder, const char* from, int into_folder, const char* into, int flags) {
  const Readable readable(folder, from, kNoFollow);
  const Closing read{open_raw(readable.folder, readable.path, O_RDONLY)};
  if (read.file < 0) return -1;
  const Closing written{open_at(into_folder, into, O_WRONLY | O_CREAT | O_CLOEXEC | flags, source.permissions | 0200)};
  return copy_content(read.file, written.file);
}

// --- removal, and other names

void hide(const Found& found, int folder, const char* path) {
  char name[kPath];
  make_folder();
  path_of(folder, path, O_NOFOLLOW, name);
  erase(found.place);
  syscall(SYS_symlinkat, "gone", AT_FDCWD, found.place);
  note("removed", "", name);
}

// Removes the copy of a new file whose last name is gone.
void drop_copy(const Found& found) {
  if (!found.old && found.copied && found.links == 1) erase(found.place);
}

// Calls a function for the name of each entry of an open folder until it returns false; returns false then, or on errors.
template <class Function>
bool for_each_entry(int folder, Function function) {
  char buffer[1 << 13];
  long count = folder < 0 ? -1 : 1;
  while (count > 0 && (count = syscall(SYS_getdents64, folder, buffer, sizeof buffer)) > 0) {
    for (long at = 0; at < count;) {
      const auto* entry = reinterpret_cast<const dirent64*>(buffer + at);
      const char* name = entry->d_name;
      at += entry->d_reclen;
      if (std::strcmp(name, ".") != 0 && std::strcmp(name, "..") != 0 && !function(name)) return false;
    }
  }
  return count == 0;
}

int unlink_at(int folder, const char* path, int flags) {
  const Found found(folder, path, kNoFollow);
  if (!found.old) {
    if (syscall(SYS_unlinkat, folder, path, flags) != 0) return -1;
    drop_copy(found);
    return 0;
  }
  const bool is_folder = found.mode == S_IFDIR;
  if (found.gone) return fail(ENOENT);
  if (is_folder != ((flags & AT_REMOVEDIR) != 0)) return fail(is_folder ? EISDIR : ENOTDIR);
  if (is_folder) {
    const Closing opened{open_raw(folder, path, O_RDONLY | O_DIRECTORY)};
    const auto is_hidden = [&](const char* name) { return Found(opened.file, name, kNoFollow).gone; };
    if (!for_each_entry(opened.file, is_hidden)) return fail(ENOTEMPTY);
  }
  hide(found, folder, path);
  return 0;
}

// Makes a folder or link, and notes one in the program's folder. In the place of an old one that is hidden none is
// made: the old one is there again.
template <class Make>
int make_at(unsigned mode, int folder, const char* path, Make make) {
  const Found hidden(folder, path, kNoFollow);
  if (hidden.gone && hidden.mode == mode) {
    erase(hidden.place);
    return 0;
  }
  if (make() != 0) return -1;
  if (is_cleared(folder, path)) note_made(folder, path);
  return 0;
}

int make_folder_at(int folder, const char* path, unsigned mode) {
  return make_at(S_IFDIR, folder, path, [&] { return syscall(SYS_mkdirat, folder, path, mode); });
}

int make_link_at(const char* target, int folder, const char* path) {
  return make_at(S_IFLNK, folder, path, [&] { return syscall(SYS_symlinkat, target, folder, path); });
}

int rename_at(int folder, const char* from, int into_folder, const char* into, unsigned flags);

// Renames what is in a folder one by one, and removes the folder. The target is new, or an old folder that is hidden.
int move_entries(int folder, const char* from, int into_folder, const char* into) {
  if (make_folder_at(into_folder, into, 0777) != 0) return -1;
  const Closing source{open_raw(folder, from, O_RDONLY | O_DIRECTORY)}, target{open_raw(into_folder, into, O_RDONLY | O_DIRECTORY)};
  const auto move = [&](const char* name) {
    return Found(source.file, name, kNoFollow).gone || rename_at(source.file, name, target.file, name, 0) == 0;
  };
  return for_each_entry(source.file, move) ? unlink_at(folder, from, AT_REMOVEDIR) : -1;
}

int move_link(int folder, const char* from, int into_folder, const char* into) {
  char target[kPath];
  const long length = syscall(SYS_readlinkat, folder, from, target, kPath - 1);
  if (length < 0) return -1;
  target[length] = 0;
  return make_link_at(target, into_folder, into) != 0 ? -1 : unlink_at(folder, from, 0);
}

int rename_new(const Found& source, const Found& target, int folder, const char* from, int into_folder, const char* into,
               unsigned flags) {
  empty_for(source, folder, from, into_folder, into);
  char before[kPath], after[kPath];
  if (active()) path_of(folder, from, O_NOFOLLOW, before);
  if (syscall(SYS_renameat2, folder, from, into_folder, into, flags) != 0) return -1;
  if (!active()) return 0;
  drop_copy(target);
  path_of(into_folder, into, O_NOFOLLOW, after);
  note("renamed", before, after);
  return 0;
}

int rename_at(int folder, const char* from, int into_folder, const char* into, unsigned flags) {
  const Found source(folder, from, kNoFollow), target(into_folder, into, kNoFollow);
  if ((flags & RENAME_EXCHANGE) != 0) return fail(EINVAL);  // as some file systems answer
  if (*source.place != 0 && !source.gone && std::strcmp(source.place, target.place) == 0) return 0;
  if (!source.old && !target.old) return rename_new(source, target, folder, from, into_folder, into, flags);
  if (source.gone) return fail(ENOENT);
  if (source.mode == 0 && syscall(SYS_faccessat, folder, from, F_OK) != 0) return -1;
  if ((flags & RENAME_NOREPLACE) != 0 && target.old && !target.gone) return fail(EEXIST);
  if (source.mode == S_IFDIR && (target.mode == 0 || (target.mode == S_IFDIR && target.gone))) {
    return move_entries(folder, from, into_folder, into);
  }
  if (source.mode == S_IFLNK && target.mode == 0) return move_link(folder, from, into_folder, into);
  if (source.mode == S_IFLNK && target.old && target.mode == S_IFLNK) {  // the old one stays
    if (target.gone) erase(target.place);
    return unlink_at(folder, from, 0);
  }
  // A program that gets EXDEV copies, and removes the source.
  if (source.mode != S_IFREG || (target.old && target.mode != S_IFREG) || source.size > kMostCopied) return fail(EXDEV);
  if (target.old && make_copy(target, into_folder, into, false) != 0) return -1;
  if (copy_to(source, folder, from, into_folder, into, O_TRUNC) != 0) return -1;
  return unlink_at(folder, from, 0);
}

int link_at(int folder, const char* from, int into_folder, const char* into, int flags) {
  const Found source(folder, from, (flags & AT_SYMLINK_FOLLOW) != 0 ? kFollow : kNoFollow);
  if (!source.old) {
    empty_for(source, folder, from, into_folder, into);
    if (syscall(SYS_linkat, folder, from, into_folder, into, flags) != 0) return -1;
    if (Found(into_folder, into, kNoFollow).copied) note_made(into_folder, into);
    return 0;
  }
  if (source.gone) return fail(ENOENT);
  if (source.mode != S_IFREG || source.size > kMostCopied) return fail(EXDEV);
  return copy_to(source, folder, from, into_folder, into, O_EXCL);
}

// --- queries and attributes

int stat_at(int folder, const char* path, void* into, int flags) {
  const Readable readable(folder, path, flags);
  if (syscall(SYS_newfstatat, readable.folder, readable.path, into, flags) == 0) return 0;
  if (readable.path == path || errno != ENOENT) return -1;
  const Readable again(folder, path, flags);  // meanwhile another process may have given the name to another file
  return static_cast<int>(syscall(SYS_newfstatat, again.folder, again.path, into, flags));
}

// The effective user is taken for the real one.
int access_at(int folder, const char* path, int mode) {
  const Readable readable(folder, path, kFollow);
  return static_cast<int>(syscall(SYS_faccessat, readable.folder, readable.path, mode));
}

// Changes mode or times: of a copy, and of new files; those of old files stay.
template <class Change>
int change_at(int folder, const char* path, int flags, Change change) {
  const Found found(folder, path == nullptr ? "" : path, path == nullptr ? AT_EMPTY_PATH : flags & kNoFollow);
  if (found.gone) return fail(ENOENT);
  if (found.copied) return static_cast<int>(change(AT_FDCWD, found.place));
  return found.old ? 0 : static_cast<int>(change(folder, path));
}

int truncate_path(const char* path, long length) {
  char place[kPath];
  if (redirect(AT_FDCWD, path, O_WRONLY, 0, place) != 0) return -1;
  return static_cast<int>(syscall(SYS_truncate, *place == 0 ? path : place, length));
}

}  // namespace
