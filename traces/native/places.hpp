// Where in a program: an operation and a source line, from the frames of a stack.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>

#include "texts.hpp"

namespace traces {

// Numbers of texts, each -1 where unknown.
struct Place {
  int32_t operation = -1, line = -1;

  // Adds the next frame outward; whether those beyond it say no more.
  bool add(const Place& frame) {
    if (operation < 0) operation = frame.operation;
    line = frame.line;
    return line >= 0;
  }
};

// The NAME of `at::_ops::NAME::`, with which a function's name begins; empty if it does not.
inline std::string_view operation_in(std::string_view name) {
  constexpr std::string_view before = "at::_ops::";
  if (name.substr(0, before.size()) != before) return {};
  const std::string_view rest = name.substr(before.size());
  size_t end = 0;
  const auto letter = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_';
  };
  while (end < rest.size() && letter(rest[end])) ++end;
  return rest.substr(end, 2) == "::" ? rest.substr(0, end) : std::string_view{};
}

// PyTorch as it is installed, or without the folders before it; a user's own folder may have its name.
inline bool is_pytorchs(std::string_view file) {
  return file.substr(0, 6) == "torch/" || file.find("site-packages/torch/") != std::string_view::npos ||
         file.find("dist-packages/torch/") != std::string_view::npos;
}

// Python outside of PyTorch.
inline bool is_users(std::string_view file) {
  constexpr std::string_view python = ".py";
  return file.size() >= python.size() && file.substr(file.size() - python.size()) == python && !is_pytorchs(file);
}

class Places {
 public:
  Places(Budget& budget, Texts& texts, bool paths) : budget_(budget), texts_(texts), paths_(paths) {}

  // Of one frame: the numbers of its two texts, -1 for none.
  Place of(int64_t name, int64_t file, int64_t line) {
    const auto [found, fresh] = known_.try_emplace({name, file, line});
    if (!fresh) return found->second;
    budget_.take(kNode);
    if (name >= 0) {
      const std::string_view operation = operation_in(texts_[static_cast<size_t>(name)]);
      if (!operation.empty()) found->second.operation = static_cast<int32_t>(texts_.id(operation));
    }
    if (file < 0) return found->second;
    std::string_view path = texts_[static_cast<size_t>(file)];
    if (!is_users(path)) return found->second;
    if (!paths_) path = path.substr(path.rfind('/') + 1);
    found->second.line = static_cast<int32_t>(texts_.id(std::string(path) + ':' + std::to_string(line)));
    return found->second;
  }

 private:
  static constexpr size_t kNode = 80;
  Budget& budget_;
  Texts& texts_;
  bool paths_;
  std::map<std::tuple<int64_t, int64_t, int64_t>, Place> known_;
};

}  // namespace traces
