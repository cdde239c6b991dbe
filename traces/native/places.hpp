// The place of an event in the recorded program: operation, source line and Python frames, from a stack.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>

#include "chunked.hpp"
#include "source_files.hpp"
#include "texts.hpp"

namespace traces {

// Numbers of texts, each -1 where unknown. `stack`: the Python frames, innermost first, one per line.
struct Place {
  int32_t operation = -1, line = -1, stack = -1;
};

// Returns NAME from a function's name that begins with `at::_ops::NAME::`; else an empty text.
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

class Places {
 public:
  Places(Budget& budget, Texts& texts, bool paths) : budget_(budget), texts_(texts), paths_(paths), frames_(budget) {}

  // Returns the number of a frame with these two texts (-1 for none) and this line.
  uint32_t frame(int64_t name, int64_t file, int64_t line) {
    const auto [found, fresh] = known_.try_emplace({name, file, line}, static_cast<uint32_t>(frames_.size()));
    if (fresh) {
      budget_.take(kNode);
      frames_.push(described(name, file, line));
    }
    return found->second;
  }

  // Collector of the frames of one stack, the innermost first.
  class Stack {
   public:
    explicit Stack(Places& places) : places_(places) {}

    void add(uint32_t number) {
      const Frame& frame = places_.frames_[number];
      if (count_++ == 0) inner_ = frame.function;
      if (outside_pytorch_ < 0 && operation_ < 0) operation_ = frame.operation;
      if (line_ < 0 && !frame.library) line_ = frame.line;
      if (outside_pytorch_ < 0 && !frame.pytorch) outside_pytorch_ = frame.line;
      if (frame.text < 0 || frames_ == kMostFrames) return;
      if (frames_++ > 0) text_ += '\n';
      text_ += places_.texts_[static_cast<size_t>(frame.text)];
    }
    // Without operator names, as in stacks of Python frames alone, the innermost PyTorch function is the
    // operation.
    Place place() {
      const auto stack = text_.empty() ? -1 : static_cast<int32_t>(places_.texts_.id(text_));
      return {operation_ >= 0 ? operation_ : inner_, line_ >= 0 ? line_ : outside_pytorch_, stack};
    }

   private:
    static constexpr int kMostFrames = 64;
    Places& places_;
    std::string text_;
    int32_t operation_ = -1, line_ = -1, outside_pytorch_ = -1, inner_ = -1;
    int frames_ = 0;
    size_t count_ = 0;
  };

 private:
  // Numbers of texts, -1 for none. `function`: for PyTorch's files, such as "functional.einsum".
  struct Frame {
    int32_t operation = -1, line = -1, text = -1, function = -1;
    bool library = false, pytorch = false;
  };

  Frame described(int64_t name, int64_t file, int64_t line) {
    Frame frame;
    const std::string_view function = name < 0 ? std::string_view{} : texts_[static_cast<size_t>(name)];
    const std::string_view operation = operation_in(function);
    if (!operation.empty()) frame.operation = id(std::string(operation));
    if (file < 0) return frame;
    std::string path = with_slashes(texts_[static_cast<size_t>(file)]);
    if (!is_python_file(path)) return frame;
    frame.pytorch = is_pytorch_file(path), frame.library = is_library_file(path);
    const std::string base = path.substr(path.rfind('/') + 1);
    const std::string place = (paths_ ? path : base) + ':' + std::to_string(line);
    frame.line = id(place);
    frame.text = function.empty() ? frame.line : id(place + ' ' + std::string(function.substr(0, kLongestFunction)));
    if (frame.pytorch && !function.empty())
      frame.function = id(base.substr(0, base.size() - 3) + '.' + std::string(function.substr(0, kLongestFunction)));
    return frame;
  }
  int32_t id(const std::string& text) { return static_cast<int32_t>(texts_.id(text)); }

  static constexpr size_t kNode = 80, kLongestFunction = 200;
  Budget& budget_;
  Texts& texts_;
  bool paths_;
  std::map<std::tuple<int64_t, int64_t, int64_t>, uint32_t> known_;
  Chunked<Frame> frames_;
};

}  // namespace traces
