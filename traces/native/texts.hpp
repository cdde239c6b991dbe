// Interned texts, numbered from 0.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "chunked.hpp"

namespace traces {

// True if bytes are UTF-8, including single surrogates, which Python writes for file names that are not
// UTF-8.
inline bool is_utf8(std::string_view text) {
  const auto* at = reinterpret_cast<const uint8_t*>(text.data());
  const auto* const end = at + text.size();
  while (at != end) {
    const uint8_t first = *at++;
    if (first < 0x80) continue;
    const int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
    if (first < 0xC2 || first > 0xF4 || end - at < more) return false;
    const uint8_t low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
    const uint8_t high = first == 0xF4 ? 0x8F : 0xBF;
    if (*at < low || *at > high) return false;
    for (int k = 1; k < more; ++k)
      if ((at[k] & 0xC0) != 0x80) return false;
    at += more;
  }
  return true;
}

class Texts {
 public:
  static constexpr size_t kMost = size_t{1} << 28;  // so that two numbers fit one word

  explicit Texts(Budget& budget) : budget_(budget), views_(budget) {}

  size_t size() const { return views_.size(); }
  std::string_view operator[](size_t id) const { return views_[id]; }

  // Returns the number of a text; -1 if not UTF-8. The map is ordered, so that no choice of texts is slow.
  int64_t id(std::string_view text) {
    const auto found = ids_.lower_bound(text);
    if (found != ids_.end() && found->first == text) return found->second;
    if (!is_utf8(text)) return -1;
    if (views_.size() == kMost) throw Refused("it holds too many texts");
    budget_.take(text.size() + kNode);
    auto& kept = storage_.emplace_back(new char[text.size()]);
    std::memcpy(kept.get(), text.data(), text.size());
    const std::string_view view(kept.get(), text.size());
    const auto id = static_cast<uint32_t>(views_.size());
    ids_.emplace_hint(found, view, id);
    views_.push(view);
    return id;
  }

 private:
  static constexpr size_t kNode = 96;  // approximate bytes of map and heap per text
  Budget& budget_;
  Chunked<std::string_view> views_;
  std::vector<std::unique_ptr<char[]>> storage_;
  std::map<std::string_view, uint32_t> ids_;
};

}  // namespace traces
