// Tensors that say `cuda:0`, whose memory and kernels are the CPU's.
//
// A storage on the device holds a storage on the CPU. Every operation that has a kernel on the CPU gets one for CUDA: it
// takes the tensors' CPU storages, calls the CPU's kernel, and gives what comes out storages on the device. All above the
// kernels (autograd, vmap, forward mode, dispatch modes, subclasses) is torch's own and sees a device like any other.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

const c10::Device GPU(c10::DeviceType::CUDA, 0);
bool reports_waits = false;

// The words of torch.cuda.set_sync_debug_mode("warn").
void report_wait(const std::string& name) {
  if (reports_waits) TORCH_WARN("called a synchronizing CUDA operation (", name, ")");
}

// ---- storages -------------------------------------------------------------------------------------------------------

void release(void* held) { delete static_cast<c10::Storage*>(held); }

c10::DataPtr on_device(const c10::Storage& cpu) { return {cpu.mutable_data(), new c10::Storage(cpu), release, GPU}; }

c10::Storage storage_on_device(const c10::Storage& cpu) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), cpu.nbytes(), on_device(cpu), c10::GetAllocator(GPU.type()), true));
}

const c10::Storage& storage_on_cpu(const c10::Storage& device) {
  auto* held = device.data_ptr().cast_context<c10::Storage>(release);
  TORCH_INTERNAL_ASSERT(held, "a storage that the stand-in did not make");
  return *held;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return on_device(c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), bytes, c10::GetAllocator(c10::kCPU), true)));
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} allocator;

// ---- generators -----------------------------------------------------------------------------------------------------

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator cpu;
  explicit DeviceGenerator(at::Generator cpu) : GeneratorImpl(GPU, DispatchKeySet(DispatchKey::CUDA)), cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(cpu.clone()); }
};

at::Generator& default_generator() {
  static at::Generator generator = at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator());
  return generator;
}

// ---- kernels --------------------------------------------------------------------------------------------------------

const std::set<std::string> INDEXING = {  // besides copies, these take tensors of the CPU beside those of the device
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::_unsafe_index.Tensor", "aten::index_put", "aten::index_put_",
    "aten::_index_put_impl_", "aten::_unsafe_index_put"};
const std::set<std::string> WAITING = {  // the size of the result, or whether it exists, is known to the device alone
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::nonzero.out", "aten::masked_select",
    "aten::masked_select.out", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::unique_dim_consecutive", "aten::repeat_interleave.Tensor", "aten::bincount", "aten::multinomial",
    "aten::_linalg_eigh", "aten::_linalg_svd", "aten::linalg_eig", "aten::_linalg_eigvals"};

template <class Function>
IValue each_tensor(const IValue& value, const Function& function) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(function(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(t.defined() ? function(t) : t);
    return list;
  }
  if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    c10::List<std::optional<at::Tensor>> list;
    for (const IValue& item : value.toListRef())
      list.push_back(item.isNone() ? std::optional<at::Tensor>() : std::optional<at::Tensor>(function(item.toTensor())));
    return list;
  }
  return value;
}

void shape_as(const at::Tensor& to, const at::Tensor& from) {
  auto* impl = to.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(from.sizes(), from.strides());
  impl->set_storage_offset(from.storage_offset());
}

// The tensors of one call, each on the device and as the CPU sees it.
struct Pairs {
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages;
  std::vector<at::Tensor> of_the_cpu;

  const c10::Storage& to_cpu(const c10::Storage& device) {
    storages.emplace_back(device, storage_on_cpu(device));
    return storages.back().second;
  }

  at::Tensor to_cpu(const at::Tensor& t) {
    if (!t.is_cuda()) return of_the_cpu.emplace_back(t);
    auto alias = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(to_cpu(t.storage())), DispatchKeySet(DispatchKey::CPU), t.dtype());
    shape_as(alias, t);
    tensors.emplace_back(t, alias);
    return alias;
  }

  c10::Storage to_device(const c10::Storage& cpu) {
    for (const auto& [device, own] : storages)
      if (own.unsafeGetStorageImpl() == cpu.unsafeGetStorageImpl()) return device;
    return storages.emplace_back(storage_on_device(cpu), cpu).first;
  }

  at::Tensor to_device(const at::Tensor& t) {
    for (const auto& own : of_the_cpu)
      if (t.is_same(own)) return t;
    const at::Tensor* base = nullptr;
    for (const auto& [device, alias] : tensors) {
      if (t.is_same(alias)) return device;
      if (t.storage().unsafeGetStorageImpl() == alias.storage().unsafeGetStorageImpl()) base = &device;
    }
    auto storage = to_device(t.storage());
    auto made = base ? at::detail::make_tensor<c10::TensorImpl>(
                           c10::TensorImpl::VIEW, std::move(storage), base->key_set(), t.dtype())
                     : at::detail::make_tensor<c10::TensorImpl>(
                           std::move(storage), DispatchKeySet(DispatchKey::CUDA), t.dtype());
    shape_as(made, t);
    return made;
  }

  // An operation in place may have resized a tensor or its storage, or given it another one.
  void update() {
    for (const auto& [device, alias] : std::vector(tensors)) {
      auto storage = to_device(alias.storage());
      if (storage.data() != alias.storage().data() || storage.nbytes() != alias.storage().nbytes()) {
        storage.set_data_ptr_noswap(on_device(alias.storage()));
        storage.set_nbytes(alias.storage().nbytes());
      }
      if (storage.unsafeGetStorageImpl() != device.storage().unsafeGetStorageImpl())
        device.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
      if (device.sizes() != alias.sizes() || device.strides() != alias.strides() ||
          device.storage_offset() != alias.storage_offset())
        shape_as(device, alias);
    }
  }
};

struct Kernel final : c10::OperatorKernel {
  std::string name;
  size_t arguments, results, generator;
  bool copies, indexes, waits, writes;

  explicit Kernel(const c10::OperatorHandle& op)
      : name(c10::toString(op.operator_name())),
        arguments(op.schema().arguments().size()),
        results(op.schema().returns().size()),
        generator(arguments),
        copies(name == "aten::copy_"),
        indexes(INDEXING.count(name)),
        waits(WAITING.count(name)),
        writes(op.schema().is_mutable()) {
    for (size_t i = 0; i < arguments; ++i)
      if (op.schema().arguments()[i].type()->str().find("Generator") != std::string::npos) generator = i;
  }

  void operator()(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
    Pairs pairs;
    const size_t first = stack->size() - arguments;
    if (waits) report_wait(name);
    if (indexes) look_at_indices((*stack)[first + 1], arguments > 2 ? (*stack)[first + 2] : IValue());
    for (size_t i = 0; i < arguments; ++i) {
      auto& value = (*stack)[first + i];
      if (i == generator) value = on_cpu(value);
      else if (value.isDevice()) value = c10::Device(c10::kCPU);
      else if (value.isStorage()) value = pairs.to_cpu(value.toStorage());
      else value = each_tensor(value, [&](const at::Tensor& t) { return pairs.to_cpu(t); });
    }
    for (const auto& t : pairs.of_the_cpu) {
      if (copies && t.is_same((*stack)[first].toTensor())) report_wait("copy to the host");
      else if (copies && !(*stack)[first + 2].toBool()) report_wait("copy from the host");
      else
        TORCH_CHECK(copies || indexes || t.dim() == 0, "Expected all tensors to be on the same device, but found at least two devices, "
                    "cuda:0 and cpu! (", name, ", of shape ", t.sizes(), ")");
    }
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
    if (writes) pairs.update();
    for (size_t i = stack->size() - results; i < stack->size(); ++i)
      (*stack)[i] = each_tensor((*stack)[i], [&](const at::Tensor& t) { return pairs.to_device(t); });
  }

  static at::Generator on_cpu(const IValue& given) {
    auto own = given.isNone() ? default_generator() : given.toGenerator();
    TORCH_CHECK(own.device().is_cuda(), "Expected a 'cuda' device type for generator but found '", own.device().type(), "'");
    return static_cast<DeviceGenerator*>(own.unsafeGetGeneratorImpl())->cpu;
  }

  // A mask's size is known to the device alone; but one number from the host is filled in without asking for it.
  static void look_at_indices(const IValue& indices, const IValue& put) {
    const bool fills = put.isTensor() && put.toTensor().is_cpu() && put.toTensor().dim() == 0;
    each_tensor(indices, [&](const at::Tensor& index) {
      const bool mask = index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
      if (index.is_cpu()) report_wait("index from the host");
      else if (mask && !fills) report_wait("index by a mask");
      return index;
    });
  }
};

// Zeros without memory: here with.
void zeros(const c10::OperatorHandle&, DispatchKeySet, Stack* stack) {
  const auto sizes = torch::jit::peek(*stack, 0, 5).toIntVector();
  const auto dtype = torch::jit::peek(*stack, 1, 5).toOptional<at::ScalarType>();
  torch::jit::drop(*stack, 5);
  stack->push_back(at::zeros(sizes, at::TensorOptions().device(GPU).dtype(dtype)));
}

// Attention by its formula: the CPU has no kernel by the names of CUDA's fused ones.
void no_fused_attention(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->push_back(int64_t(0));
}

// ---- the device -----------------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, GPU); }
  c10::DeviceType type() const override { return GPU.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return GPU; }
  c10::Device getDevice() const override { return GPU; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
} guard;

}  // namespace

namespace at {
struct StandIn final : CUDAHooksInterface {
  explicit StandIn(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override {
    static bool first = true;  // made by stand_in.py: torch.cuda.default_generators
    if (std::exchange(first, false)) return default_generator();
    return at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator());
  }
};
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, StandIn)
}  // namespace at

extern "C" void report_waits(bool on) { reports_waits = on; }

// Once torch has been imported, whose own build for CUDA is thereby covered up; the hooks above are read sooner than that.
extern "C" void install() {
  static std::vector<c10::RegistrationHandleRAII> registered;
  c10::impl::DeviceGuardImplRegistrar(GPU.type(), &guard);
  c10::SetAllocator(GPU.type(), &allocator, 255);
  auto& dispatcher = c10::Dispatcher::singleton();
  const std::set<std::string> composite = {"aten::copy_", "aten::convolution", "aten::convolution_backward"};
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (!op || name.name.compare(0, 6, "aten::") != 0) continue;
    auto text = c10::toString(name);
    const bool of_cuda = op->hasKernelForDispatchKey(DispatchKey::CUDA) &&  // in a build for CUDA
        op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
    if (!op->hasKernelForDispatchKey(DispatchKey::CPU) && !of_cuda && !composite.count(text)) continue;
    auto function = text == "aten::_efficientzerotensor" ? c10::KernelFunction::makeFromBoxedFunction<&zeros>()
        : text == "aten::_fused_sdp_choice" ? c10::KernelFunction::makeFromBoxedFunction<&no_fused_attention>()
        : c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(*op));
    registered.push_back(dispatcher.registerImpl(name, DispatchKey::CUDA, std::move(function), std::nullopt, nullptr, "stand-in"));
  }
}
