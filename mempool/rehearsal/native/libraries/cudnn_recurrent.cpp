// cuDNN's recurrent layers: descriptors, the places of their weights, and the memory that they ask for. The functions that
// compute are generated. Numbers are values of the enumerations in cudnn_adv.h.
#include "libraries/cudnn.hpp"

using namespace standin;
using namespace standin::cudnn;

namespace {

constexpr int kNoBias = 0, kTwoBiases = 2, kBidirectional = 1, kTraining = 1;
constexpr std::int32_t kProjection = 8;  // the number of an LSTM's projection among its matrices

struct Sequences {  // of a cudnnRNNDataDescriptor_t
  int data_type = 0, layout = 0, steps = 0, batch = 0, width = 0;
};
// The beginning of the descriptor of a dropout.
struct Dropout {
  float probability;
};

struct Matrix {
  std::int64_t offset = 0, rows = 0, columns = 0;  // in elements
};

std::int64_t matrix_elements(const Recurrence& of, std::int64_t layer) {
  const std::int64_t gates = of.gates() * of.hidden * (of.columns(layer) + of.output());
  return gates + (of.projected > 0 ? of.hidden * of.projected : 0);
}
std::int64_t bias_elements(const Recurrence& of) {
  return of.bias == kNoBias ? 0 : (of.bias == kTwoBiases ? 2 : 1) * of.gates() * of.hidden;
}
std::int64_t all_matrices(const Recurrence& of) {
  std::int64_t elements = 0;
  for (std::int64_t layer = 0; layer < of.layers; ++layer) elements += of.directions * matrix_elements(of, layer);
  return elements;
}

// The matrices of all layers come first: for each layer and direction those of the input, of the state and the projection.
// A linear layer is numbered by its gate, those of the state after those of the input.
Matrix matrix_of(const Recurrence& of, std::int64_t place, std::int32_t linear) {
  const std::int64_t layer = place / of.directions, gates = of.gates();
  Matrix found;
  for (std::int64_t before = 0; before < place; ++before) found.offset += matrix_elements(of, before / of.directions);
  const std::int64_t inputs = of.hidden * of.columns(layer), states = of.hidden * of.output();
  if (linear == kProjection) {
    found.offset += gates * (inputs + states);
    found.rows = of.projected;
    found.columns = of.hidden;
    return found;
  }
  const bool input = linear < gates;
  found.offset += input ? linear * inputs : gates * inputs + (linear - gates) * states;
  found.rows = of.hidden;
  found.columns = input ? of.columns(layer) : of.output();
  return found;
}

}  // namespace

extern "C" int cudnnSetTensorNdDescriptor(void* tensor, int data_type, int rank, const int* sizes, const int* strides);

EXPORTED int cudnnCreateRNNDescriptor(Recurrence** made) {
  *made = new Recurrence;
  return kSuccess;
}
EXPORTED int cudnnDestroyRNNDescriptor(Recurrence* made) {
  delete made;
  return kSuccess;
}
EXPORTED int cudnnSetRNNDescriptor_v8(Recurrence* into, int, int cell, int bias, int direction, int, int data_type, int, int,
                                      std::int32_t input, std::int32_t hidden, std::int32_t projected, std::int32_t layers,
                                      const Dropout* dropout, std::uint32_t) {
  *into = {cell,   bias,   direction == kBidirectional ? 2 : 1,   data_type,
           input,  hidden, projected == hidden ? 0 : projected, layers,
           dropout == nullptr ? 0 : dropout->probability};
  return kSuccess;
}
EXPORTED int cudnnCreateRNNDataDescriptor(Sequences** made) {
  *made = new Sequences;
  return kSuccess;
}
EXPORTED int cudnnDestroyRNNDataDescriptor(Sequences* made) {
  delete made;
  return kSuccess;
}
EXPORTED int cudnnSetRNNDataDescriptor(Sequences* into, int data_type, int layout, int steps, int batch, int width, const int*,
                                       void*) {
  *into = {data_type, layout, steps, batch, width};
  return kSuccess;
}

EXPORTED int cudnnGetRNNWeightSpaceSize(void*, const Recurrence* of, std::size_t* bytes) {
  const std::int64_t elements = all_matrices(*of) + of->layers * of->directions * bias_elements(*of);
  *bytes = static_cast<std::size_t>(elements) * element_bytes(of->data_type);
  return kSuccess;
}
EXPORTED int cudnnGetRNNWeightParams(void*, const Recurrence* of, std::int32_t place, std::size_t, const void* weights,
                                     std::int32_t linear, void* matrix, void** matrix_at, void* bias, void** bias_at) {
  if (place < 0 || place >= of->layers * of->directions) return kBadParam;
  const auto element = static_cast<std::int64_t>(element_bytes(of->data_type));
  auto* const begin = static_cast<char*>(const_cast<void*>(weights));
  const auto describe = [&](void* into, std::int64_t rows, std::int64_t columns) {
    const int sizes[] = {1, static_cast<int>(rows), static_cast<int>(columns)};
    const int strides[] = {static_cast<int>(rows * columns), static_cast<int>(columns), 1};
    return cudnnSetTensorNdDescriptor(into, of->data_type, 3, sizes, strides);
  };
  if (matrix != nullptr && matrix_at != nullptr) {
    const Matrix found = matrix_of(*of, place, linear);
    *matrix_at = found.rows == 0 ? nullptr : begin + found.offset * element;
    describe(matrix, found.rows, found.columns);
  }
  if (bias != nullptr && bias_at != nullptr) {
    const bool exists = linear < kProjection && (of->bias == kTwoBiases || (of->bias != kNoBias && linear < of->gates()));
    const std::int64_t offset = all_matrices(*of) + place * bias_elements(*of) + linear * of->hidden;
    *bias_at = exists ? begin + offset * element : nullptr;
    describe(bias, exists ? of->hidden : 0, 1);
  }
  return kSuccess;
}
EXPORTED int cudnnGetRNNTempSpaceSizes(void*, const Recurrence* of, int mode, const Sequences* x, std::size_t* work,
                                       std::size_t* reserve) {
  if (work != nullptr) *work = workspace_bytes(*of, x->steps, x->batch);
  if (reserve != nullptr) *reserve = mode == kTraining ? reserve_bytes(*of, x->steps, x->batch) : 0;
  return kSuccess;
}
