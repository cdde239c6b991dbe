// Classification of source files by path: user program, PyTorch, other libraries. Windows paths are expected after
// `with_slashes`.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

namespace traces {

inline std::string with_slashes(std::string_view path) {
  std::string result(path);
  std::replace(result.begin(), result.end(), '\\', '/');
  return result;
}

inline bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

inline bool is_python_file(std::string_view path) {
  return path.size() >= 3 && path.substr(path.size() - 3) == ".py";
}

// True for PyTorch as installed or without the folders before it, and for the kernels that its compiler
// generates. A folder of the user's may be called torch, too.
inline bool is_pytorch_file(std::string_view path) {
  return path.substr(0, 6) == "torch/" || contains(path, "site-packages/torch/") ||
         contains(path, "dist-packages/torch/") || contains(path, "/torchinductor_");
}

// True for installed packages, for this project's modules that run within a program, even if they are installed in place
// (pip install -e), and for Python's own modules. A library's model definitions count as the user's
// program: their lines identify the layer, while the line of the user's file is one call for the whole
// training.
inline bool is_library_file(std::string_view path) {
  if (is_pytorch_file(path)) return true;
  const std::string_view name = path.substr(path.rfind('/') + 1);
  if (contains(path, "site-packages/") || contains(path, "dist-packages/"))
    return !contains(path, "/models/") && name.substr(0, 9) != "modeling_";
  for (const std::string_view own : {"/mempool/torch/", "/mempool/rehearsal/", "/mempool/recording/"})
    if (contains(path, own)) return true;
  const bool windows = path.substr(1, 2) == ":/";
  return contains(path, "/lib/python3") || contains(path, "/lib64/python3") || (windows && contains(path, "/Lib/"));
}

}  // namespace traces
