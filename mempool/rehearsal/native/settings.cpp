#include "settings.hpp"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>

namespace standin {

namespace {

[[noreturn]] void refuse(const std::string& item) {
  std::fprintf(stderr, "mempool: MEMPOOL_STANDIN has no setting %s\n", item.c_str());
  std::exit(2);
}

std::size_t number(const std::string& item, const std::string& text) {
  char* end = nullptr;
  const unsigned long long value = std::strtoull(text.c_str(), &end, 10);
  if (text.empty() || text[0] < '0' || text[0] > '9' || *end != '\0') refuse(item);
  return value;
}

void set(Settings& into, const std::string& item) {
  const std::size_t at = item.find('=');
  const std::string key = item.substr(0, at), text = at == std::string::npos ? "" : item.substr(at + 1);
  const std::map<std::string, int Settings::*> numbers = {{"devices", &Settings::devices},
                                                          {"processors", &Settings::processors},
                                                          {"runtime", &Settings::runtime},
                                                          {"cudnn", &Settings::cudnn}};
  const std::map<std::string, std::size_t Settings::*> sizes = {{"memory", &Settings::memory},
                                                                {"context", &Settings::context}};
  const std::map<std::string, Values> values = {
      {"zero", Values::zero}, {"random", Values::random}, {"copied", Values::copied}};
  if (const auto found = numbers.find(key); found != numbers.end()) {
    into.*found->second = static_cast<int>(number(item, text));
  } else if (const auto size = sizes.find(key); size != sizes.end()) {
    into.*size->second = number(item, text);
  } else if (key == "name") {
    into.name = text;
  } else if (key == "driver") {
    into.driver = text;
  } else if (key == "arguments") {
    into.arguments = text;
  } else if (key == "capability") {
    const std::size_t dot = text.find('.');
    into.major = static_cast<int>(number(item, text.substr(0, dot)));
    into.minor = dot == std::string::npos ? 0 : static_cast<int>(number(item, text.substr(dot + 1)));
  } else if (key == "values" && values.count(text) != 0) {
    into.values = values.at(text);
  } else if (key == "queues" && (text == "late" || text == "prompt")) {
    into.late = text == "late";
  } else {
    refuse(item);
  }
}

Settings read() {
  Settings made;
  const char* const text = std::getenv("MEMPOOL_STANDIN");
  std::istringstream items(text != nullptr ? text : "");
  for (std::string item; std::getline(items, item, ',');) set(made, item);
  return made;
}

}  // namespace

const Settings& settings() {
  static const Settings made = read();
  return made;
}

// Source: the table of technical specifications per compute capability in NVIDIA's CUDA programming guide.
std::size_t Settings::shared_per_processor() const {
  const std::map<int, int> kib = {{60, 64},  {61, 96},  {70, 96},   {75, 64},   {80, 164}, {86, 100},
                                  {87, 164}, {89, 100}, {90, 228}, {100, 228}, {103, 228}, {120, 100}};
  const auto found = kib.find(10 * major + minor);
  return static_cast<std::size_t>(found != kib.end() ? found->second : 100) << 10;
}

}  // namespace standin
