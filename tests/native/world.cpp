// Random worlds around the core: see world/world.hpp.
//
// Usage: world run FIRST_SEED SEEDS STEPS whole|inside     worlds of these seeds; one JSON object, or the first failure
//        world shrink SEED STEPS whole|inside              the few steps that a failing seed needs, and what happens in them
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>

#include "world/report.hpp"
#include "world/world.hpp"

namespace world {
bool telling = false;
}

namespace {

using world::Counts;
using world::Setting;
using world::Step;

constexpr unsigned kPatience = 60;  // seconds that one world may take

// What a run in a process of its own says: nothing, or its failure.
std::string attempt(const Setting& setting, bool tell) {
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  std::fflush(stdout);
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(kPatience);
    close(ends[0]);
    dup2(ends[1], STDERR_FILENO);
    world::telling = tell;
    world::run(setting);
    std::fflush(stdout);
    std::_Exit(0);
  }
  close(ends[1]);
  std::string said;
  char buffer[4096];
  for (ssize_t n = 0; (n = read(ends[0], buffer, sizeof buffer)) > 0;) said.append(buffer, static_cast<std::size_t>(n));
  close(ends[0]);
  int status = 0;
  waitpid(pid, &status, 0);
  if (status != 0 && said.empty()) said = "FAILED: a signal: " + std::to_string(WIFSIGNALED(status) ? WTERMSIG(status) : status);
  return status == 0 ? std::string() : said;
}

// The promise that is broken, without the numbers.
std::string kind_of(const std::string& said) {
  const std::size_t begin = said.find("FAILED: ");
  if (begin == std::string::npos) return said.substr(0, 40);
  return said.substr(begin + 8, said.find(':', begin + 8) - begin - 8);
}

// Delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002): leaves out ever
// smaller runs of steps, as long as the same promise is broken.
void shrink(Setting setting) {
  const std::string first = attempt(setting, false);
  if (first.empty()) {
    std::printf("seed %llu does not fail\n", static_cast<unsigned long long>(setting.seed));
    return;
  }
  const std::string kind = kind_of(first);
  for (std::size_t size = std::max<std::size_t>(1, setting.steps.size() / 2);;) {
    bool less = false;
    for (std::size_t at = 0; at < setting.steps.size();) {
      Setting without = setting;
      const auto begin = without.steps.begin() + static_cast<std::ptrdiff_t>(at);
      const auto end = without.steps.begin() + static_cast<std::ptrdiff_t>(std::min(at + size, without.steps.size()));
      without.steps.erase(begin, end);
      if (kind_of(attempt(without, false)) == kind) {
        setting = std::move(without);
        less = true;
      } else {
        at += size;
      }
    }
    if (size == 1 && !less) break;
    size = less && size == 1 ? 1 : std::max<std::size_t>(1, size / 2);
  }
  std::printf("seed %llu fails in %zu steps:\n", static_cast<unsigned long long>(setting.seed), setting.steps.size());
  std::printf("%s", attempt(setting, true).c_str());
}

int run(std::uint64_t first, std::uint64_t seeds, std::size_t steps, bool interleaved) {
  const auto begun = std::chrono::steady_clock::now();
  Counts sum;
  for (std::uint64_t seed = first; seed < first + seeds; ++seed) {
    std::fprintf(stderr, "seed %llu\r", static_cast<unsigned long long>(seed));
    alarm(kPatience);
    const Counts counts = world::run(Setting::of(seed, steps, interleaved));
    sum.events += counts.events;
    sum.steps += counts.steps;
    sum.allocations += counts.allocations;
    sum.refused += counts.refused;
    for (std::size_t i = 0; i < sum.outcomes.size(); ++i) sum.outcomes[i] += counts.outcomes[i];
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  const auto print = [](const char* name, std::uint64_t value) { std::printf("\"%s\": %llu, ", name, static_cast<unsigned long long>(value)); };
  std::printf("{");
  print("worlds", seeds), print("steps", sum.steps), print("events", sum.events), print("allocations", sum.allocations);
  print("refused", sum.refused), print("host_refused", world::host_memory.failed);
  for (std::size_t i = 0; i < sum.outcomes.size(); ++i) print(mempool::kOutcomeNames[i], sum.outcomes[i]);
  std::printf("\"seconds\": %.3f}\n", seconds);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  const auto number = [&](int i) { return std::strtoull(argv[i], nullptr, 10); };
  const bool interleaved = std::strcmp(argv[argc - 1], "inside") == 0;
  if (std::strcmp(argv[1], "run") == 0 && argc == 6) return run(number(2), number(3), number(4), interleaved);
  if (std::strcmp(argv[1], "shrink") != 0 || argc != 5) return 2;
  shrink(Setting::of(number(2), number(3), interleaved));
}
