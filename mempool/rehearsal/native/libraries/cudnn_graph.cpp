// cuDNN's graph API, which PyTorch uses for convolutions and attention: descriptors that keep their attributes, heuristics
// that return engines, and plans that know their workspace. Numbers are values of the enumerations in cudnn_graph.h.
#include <algorithm>
#include <cstring>
#include <memory>

#include "libraries/cudnn.hpp"

using namespace standin;
using namespace standin::cudnn;

namespace {

enum Type {  // cudnnBackendDescriptorType_t
  kEngine = 2,
  kEngineConfig = 3,
  kHeuristics = 4,
  kPlan = 5,
  kConvolutionForward = 10,
  kConvolutionBackwardFilter = 11,
  kConvolutionBackwardData = 12,
  kTensor = 17
};
enum Name {  // cudnnBackendAttributeName_t
  kHeuristicsMode = 200,
  kHeuristicsGraph = 201,
  kHeuristicsResults = 202,
  kConfigEngine = 300,
  kConfigKnobChoices = 302,
  kConfigWorkspace = 303,
  kConfigSharedMemory = 304,
  kPlanConfig = 401,
  kPlanWorkspace = 402,
  kForwardW = 703,
  kForwardX = 704,
  kForwardY = 705,
  kDataW = 709,
  kDataX = 710,
  kDataY = 711,
  kFilterW = 715,
  kFilterX = 716,
  kFilterY = 717,
  kGraphOperations = 801,
  kGraphEngines = 802,
  kTensorType = 901,
  kTensorSizes = 902,
  kTensorStrides = 903,
  kTensorId = 906,
  kTensorVirtual = 907,
  kTensorByValue = 908,
  kTensorRaggedOffsets = 913,
  kPackIds = 1000,
  kPackPointers = 1001,
  kPackWorkspace = 1003,
  kEngineGraph = 1300,
  kEngineIndex = 1301,
  kEngineKnobs = 1302,
  kEngineNumericalNotes = 1303,
  kEngineLayouts = 1304,
  kEngineBehaviorNotes = 1305
};
enum { kInt64 = 3, kDescriptor = 15, kNumericalNote = 11, kInt32 = 23 };  // cudnnBackendAttributeType_t
constexpr int kFallback = 2;                                              // cudnnBackendHeurMode_t
constexpr int kNoteTensorCore = 0, kNoteWinograd = 5;                     // cudnnBackendNumericalNote_t
constexpr std::int64_t kEngines = 3;                                      // as many as families of kernels

struct Contents;
using Shared = std::shared_ptr<Contents>;

struct Attribute {
  int name = 0, type = 0;
  std::int64_t count = 0;
  std::vector<char> values;
  std::vector<Shared> descriptors;
};

struct Contents {
  explicit Contents(int of) : type(of) {}
  int type;
  std::int64_t fastest = kEngines;  // of a graph: the fastest engine that has run
  std::vector<Attribute> attributes;
  std::vector<std::pair<std::int64_t, std::size_t>> extents;  // of a plan: bytes of each tensor in device memory, by its id

  const Attribute* find(int name) const {
    for (const Attribute& attribute : attributes) {
      if (attribute.name == name) return &attribute;
    }
    return nullptr;
  }
  const Contents* descriptor(int name) const {
    const Attribute* const found = find(name);
    return found == nullptr || found->descriptors.empty() ? nullptr : found->descriptors[0].get();
  }
  template <typename T>
  std::vector<T> values(int name) const {
    const Attribute* const found = find(name);
    std::vector<T> into(found == nullptr ? 0 : found->values.size() / sizeof(T));
    if (!into.empty()) std::memcpy(into.data(), found->values.data(), into.size() * sizeof(T));
    return into;
  }
  template <typename T>
  T value(int name, T otherwise) const {
    const Attribute* const found = find(name);
    T into = otherwise;
    if (found != nullptr && found->values.size() >= sizeof(T)) std::memcpy(&into, found->values.data(), sizeof(T));
    return into;
  }
  Attribute& at(int name) {
    for (Attribute& attribute : attributes) {
      if (attribute.name == name) return attribute;
    }
    attributes.emplace_back();
    attributes.back().name = name;
    return attributes.back();
  }
  template <typename T>
  void set(int name, int of, const T& value) {
    const auto* const bytes = reinterpret_cast<const char*>(&value);
    at(name) = {name, of, 1, {bytes, bytes + sizeof value}, {}};
  }
  void set(int name, std::vector<Shared> all) {
    const auto count = static_cast<std::int64_t>(all.size());
    at(name) = {name, kDescriptor, count, {}, std::move(all)};
  }
};

struct Descriptor {  // that a program holds; several may share their contents
  Shared contents;
};

// Bytes of one element of an attribute, by cudnnBackendAttributeType_t; most are enumerations.
std::size_t bytes_of(int type) {
  switch (type) {
    case 2: case 24: return 1;                          // booleans, characters
    case 26: return 16;                                 // fractions
    case 0: case kInt64: case 5: case 6: case kDescriptor: return 8;  // handles, integers, doubles, pointers
    default: return 4;
  }
}

Shape shape_of(const Contents& tensor) {
  return {tensor.value<int>(kTensorType, kFloat), tensor.values<std::int64_t>(kTensorSizes),
          tensor.values<std::int64_t>(kTensorStrides)};
}

// Read the convolution among a graph's operations. Returns false where there is none.
bool read_convolution(const Contents& graph, Convolution& into) {
  const Attribute* const operations = graph.find(kGraphOperations);
  if (operations == nullptr) return false;
  for (const Shared& operation : operations->descriptors) {
    const int type = operation->type;
    if (type < kConvolutionForward || type > kConvolutionBackwardData) continue;
    const bool forward = type == kConvolutionForward, data = type == kConvolutionBackwardData;
    into.pass = forward ? Pass::forward : data ? Pass::data_gradient : Pass::weight_gradient;
    const Contents* const x = operation->descriptor(forward ? kForwardX : data ? kDataX : kFilterX);
    const Contents* const w = operation->descriptor(forward ? kForwardW : data ? kDataW : kFilterW);
    const Contents* const y = operation->descriptor(forward ? kForwardY : data ? kDataY : kFilterY);
    if (x == nullptr || w == nullptr || y == nullptr) return false;
    into.x = shape_of(*x);
    into.w = shape_of(*w);
    into.y = shape_of(*y);
    const auto complete = [](const Shape& shape) {
      return shape.sizes.size() >= 3 && shape.strides.size() == shape.sizes.size();
    };
    return complete(into.x) && complete(into.w) && complete(into.y);
  }
  return false;
}

// Return a graph's engines, the fastest first. A graph without a convolution has one, which is not told apart further.
std::vector<Kernels> engines_of(const Contents& graph) {
  Convolution convolution;
  if (!read_convolution(graph, convolution)) return {Kernels::tensor_cores};
  return kernels_for(convolution);
}

int finish_engine(Contents& engine) {
  const Contents* const graph = engine.descriptor(kEngineGraph);
  const auto index = engine.value<std::int64_t>(kEngineIndex, -1);
  if (graph == nullptr) return kBadParam;
  const std::vector<Kernels> known = engines_of(*graph);
  if (std::none_of(known.begin(), known.end(), [=](Kernels each) { return static_cast<std::int64_t>(each) == index; })) {
    return kUnsupported;
  }
  Convolution convolution;
  const bool convolves = read_convolution(*graph, convolution);
  if (convolves && index == static_cast<std::int64_t>(Kernels::tensor_cores)) {
    engine.set(kEngineNumericalNotes, kNumericalNote, kNoteTensorCore);
  } else if (convolves && index == static_cast<std::int64_t>(Kernels::winograd)) {
    engine.set(kEngineNumericalNotes, kNumericalNote, kNoteWinograd);
  }
  return kSuccess;
}

int finish_config(Contents& config) {
  const Contents* const engine = config.descriptor(kConfigEngine);
  const Contents* const graph = engine == nullptr ? nullptr : engine->descriptor(kEngineGraph);
  if (graph == nullptr) return kBadParam;
  Convolution convolution;
  const auto kernels = static_cast<Kernels>(engine->value<std::int64_t>(kEngineIndex, 0));
  const std::size_t bytes = read_convolution(*graph, convolution) ? workspace_bytes(convolution, kernels) : 0;
  config.set(kConfigWorkspace, kInt64, static_cast<std::int64_t>(bytes));
  config.set(kConfigSharedMemory, kInt32, std::int32_t{0});
  return kSuccess;
}

int finish_heuristics(Contents& heuristics) {
  const Attribute* const given = heuristics.find(kHeuristicsGraph);
  if (given == nullptr || given->descriptors.empty()) return kBadParam;
  const Shared graph = given->descriptors[0];
  std::vector<Kernels> engines = engines_of(*graph);
  if (heuristics.value<int>(kHeuristicsMode, 0) == kFallback) {
    engines.assign(1, engines.size() > 1 ? Kernels::direct : engines[0]);
  }
  std::vector<Shared> configs;
  for (const Kernels kernels : engines) {
    const auto engine = std::make_shared<Contents>(kEngine), config = std::make_shared<Contents>(kEngineConfig);
    engine->set(kEngineGraph, {graph});
    engine->set(kEngineIndex, kInt64, static_cast<std::int64_t>(kernels));
    config->set(kConfigEngine, {engine});
    if (finish_engine(*engine) != kSuccess || finish_config(*config) != kSuccess) continue;
    configs.push_back(config);
  }
  heuristics.set(kHeuristicsResults, std::move(configs));
  return kSuccess;
}

int finish_plan(Contents& plan) {
  const Contents* const config = plan.descriptor(kPlanConfig);
  const Contents* const engine = config == nullptr ? nullptr : config->descriptor(kConfigEngine);
  const Contents* const graph = engine == nullptr ? nullptr : engine->descriptor(kEngineGraph);
  if (graph == nullptr) return kBadParam;
  plan.set(kPlanWorkspace, kInt64, config->value<std::int64_t>(kConfigWorkspace, 0));
  const Attribute* const operations = graph->find(kGraphOperations);
  for (const Shared& operation : operations == nullptr ? std::vector<Shared>() : operations->descriptors) {
    for (const Attribute& attribute : operation->attributes) {
      for (const Shared& tensor : attribute.descriptors) {
        const bool in_memory = tensor->type == kTensor && !tensor->value<char>(kTensorVirtual, 0) &&
                               !tensor->value<char>(kTensorByValue, 0) && tensor->find(kTensorRaggedOffsets) == nullptr;
        if (in_memory) plan.extents.emplace_back(tensor->value<std::int64_t>(kTensorId, 0), shape_of(*tensor).extent());
      }
    }
  }
  return kSuccess;
}

}  // namespace

EXPORTED int cudnnBackendCreateDescriptor(int type, Descriptor** made) {
  *made = new Descriptor{std::make_shared<Contents>(type)};
  return kSuccess;
}
EXPORTED int cudnnBackendDestroyDescriptor(Descriptor* descriptor) {
  delete descriptor;
  return kSuccess;
}

EXPORTED int cudnnBackendSetAttribute(Descriptor* descriptor, int name, int type, std::int64_t count, const void* values) {
  if (descriptor == nullptr || count < 0 || (values == nullptr && count > 0)) return kBadParam;
  Attribute& attribute = descriptor->contents->at(name);
  attribute = {name, type, count, {}, {}};
  if (type != kDescriptor) {
    const auto* const bytes = static_cast<const char*>(values);
    if (count > 0) attribute.values.assign(bytes, bytes + static_cast<std::size_t>(count) * bytes_of(type));
    return kSuccess;
  }
  const auto* const all = static_cast<Descriptor* const*>(values);
  for (std::int64_t i = 0; i < count; ++i) {
    if (all[i] == nullptr) return kBadParam;
    attribute.descriptors.push_back(all[i]->contents);
  }
  return kSuccess;
}

EXPORTED int cudnnBackendFinalize(Descriptor* descriptor) {
  if (descriptor == nullptr) return kBadParam;
  Contents& contents = *descriptor->contents;
  switch (contents.type) {
    case kEngine: return finish_engine(contents);
    case kEngineConfig: return finish_config(contents);
    case kHeuristics: return finish_heuristics(contents);
    case kPlan: return finish_plan(contents);
    default: return kSuccess;
  }
}

// Descriptors are returned in those that the caller has made.
EXPORTED int cudnnBackendGetAttribute(const Descriptor* descriptor, int name, int type, std::int64_t wanted,
                                      std::int64_t* count, void* values) {
  if (descriptor == nullptr) return kBadParam;
  const Contents& contents = *descriptor->contents;
  if (name == kGraphEngines) {
    if (count != nullptr) *count = 1;
    if (values != nullptr && wanted > 0) std::memcpy(values, &kEngines, sizeof kEngines);
    return kSuccess;
  }
  const Attribute* const found = contents.find(name);
  if (count != nullptr) *count = found == nullptr ? 0 : found->count;
  if (found == nullptr) {
    const bool empty = name == kEngineKnobs || name == kEngineNumericalNotes || name == kEngineBehaviorNotes ||
                       name == kEngineLayouts || name == kConfigKnobChoices;
    return empty ? kSuccess : kBadParam;
  }
  if (found->type != type) return kBadParam;
  const std::int64_t copied = std::min(wanted, found->count);
  if (values == nullptr || copied <= 0) return kSuccess;
  if (count != nullptr) *count = copied;
  if (type == kDescriptor) {
    auto* const into = static_cast<Descriptor**>(values);
    for (std::int64_t i = 0; i < copied; ++i) {
      if (into[i] == nullptr) return kBadParam;
      into[i]->contents = found->descriptors[static_cast<std::size_t>(i)];
    }
  } else {
    std::memcpy(values, found->values.data(), static_cast<std::size_t>(copied) * bytes_of(type));
  }
  return kSuccess;
}

// PyTorch's benchmark runs all plans of a graph and keeps the one that took least time. Since no kernel of the stand-in takes
// time, a plan is refused after a faster one of the same graph, so that each run of a program keeps the same plan.
EXPORTED int cudnnBackendExecute(const Library* library, const Descriptor* with, const Descriptor* pack) {
  if (library == nullptr || with == nullptr || pack == nullptr) return kBadParam;
  const Contents& plan = *with->contents;
  const Contents* const config = plan.descriptor(kPlanConfig);
  const Contents* const engine = config == nullptr ? nullptr : config->descriptor(kConfigEngine);
  if (engine == nullptr || engine->descriptor(kEngineGraph) == nullptr) return kBadParam;
  Contents& graph = *engine->find(kEngineGraph)->descriptors[0];
  const auto index = engine->value<std::int64_t>(kEngineIndex, 0);
  if (index > graph.fastest) return kUnsupported;
  const auto ids = pack->contents->values<std::int64_t>(kPackIds);
  const auto pointers = pack->contents->values<std::uintptr_t>(kPackPointers);
  const auto workspace = pack->contents->value<std::uintptr_t>(kPackWorkspace, 0);
  const auto bytes = static_cast<std::size_t>(plan.value<std::int64_t>(kPlanWorkspace, 0));
  if (bytes > 0 && workspace == 0) return kBadParam;
  std::vector<fake::Range> uses;
  if (bytes > 0) uses.push_back({workspace, bytes});
  for (const auto& [id, extent] : plan.extents) {
    const auto at = static_cast<std::size_t>(std::find(ids.begin(), ids.end(), id) - ids.begin());
    if (at < pointers.size() && pointers[at] != 0 && extent > 0) uses.push_back({pointers[at], extent});
  }
  const int code = launch(library, std::move(uses));
  if (code == kSuccess) graph.fastest = std::min(graph.fastest, index);
  return code;
}
