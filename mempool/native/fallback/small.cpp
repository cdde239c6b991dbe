#include "fallback/small.hpp"

#include <algorithm>
#include <iterator>

namespace mempool {
namespace {

// Return the largest size that the classes cover; a device whose alignment exceeds a page has no small
// blocks.
std::size_t reach(std::size_t unit, std::size_t page) {
  return unit > page ? 0 : std::min(unit * SmallBlocks::kClasses, page);
}

}  // namespace

SmallBlocks::SmallBlocks(MemorySource& source, std::size_t largest)
    : source_(source),
      unit_log2_(std::max(6u, static_cast<unsigned>(__builtin_ctzll(source.traits().alignment)))),
      largest_(std::min(largest, reach(unit(), kPage))),
      granule_(std::max(kPage, source.traits().page) / kPage) {
  // A device page larger than a region could not be committed for a part of the page.
  if (granule_ * kPage > kRegion || kRegion % (granule_ * kPage) != 0) largest_ = 0;
  for (std::size_t k = 0; largest_ != 0 && k < kClasses; ++k) {
    inverse_[k] = static_cast<std::uint32_t>(~std::uint32_t{0} / size_of(k) + 1);
  }
}

SmallBlocks::~SmallBlocks() {
  for (const auto& region : regions_) {
    std::size_t committed = 0;
    for (const Page& page : region->pages) committed += page.committed ? kPage : 0;
    source_.release_anyway(region->base, kRegion, committed);
  }
}

SmallBlocks::Region* SmallBlocks::add_region() {
  auto region = std::make_unique<Region>();
  regions_.reserve(regions_.size() + 1);
  // Make room first: a reservation could not be released during a graph capture if the insertion failed
  // afterwards.
  if (MEMPOOL_GUARDED("region_table")) regions_by_base_.make_room();
  const Address base = source_.reserve(kRegion, kRegion);
  if (base == 0) return nullptr;
  region->base = base;
  for (std::size_t i = 0; i < region->pages.size(); ++i) region->pages[i].address = base + i * kPage;
  regions_by_base_.insert(base / kRegion, region.get());
  regions_.push_back(std::move(region));
  return regions_.back().get();
}

// Another stream may still work on a page after using it; the new stream waits for that work, unless waiting
// is not allowed now.
bool SmallBlocks::may_take(const Page& page, Stream stream) const noexcept {
  return page.blocks == 0 && (page.stream == stream || !page.was_used || !source_.held());
}

SmallBlocks::Page* SmallBlocks::spare_page(Stream stream) noexcept {
  for (std::size_t i = first_spare_; i < regions_.size(); ++i) {
    Region& region = *regions_[i];
    if (region.in_use == region.pages.size()) {
      if (i == first_spare_) ++first_spare_;
      continue;
    }
    const auto takes = [&](const Page& page) { return may_take(page, stream); };
    const auto found = std::find_if(region.pages.begin(), region.pages.end(), takes);
    if (found != region.pages.end()) return found;
  }
  return nullptr;
}

bool SmallBlocks::mostly_empty() const noexcept {
  if (source_.held()) return false;
  std::size_t empty = 0;
  for (const auto& region : regions_) {
    empty += static_cast<std::size_t>(
        std::count_if(region->pages.begin(), region->pages.end(), [](const Page& page) { return page.used == 0; }));
  }
  return empty != 0 && 2 * empty >= regions_.size() * (kRegion / kPage);
}

// Forget streams without a page: they may no longer exist. The requesting stream may have no page yet.
void SmallBlocks::forget_streams() noexcept {
  for (auto& [stream, stock] : stocks_) stock.pages = 0;
  for (const auto& region : regions_) {
    for (const Page& page : region->pages) {
      if (page.blocks != 0) ++stocks_.find(page.stream)->second.pages;
    }
  }
  for (auto it = stocks_.begin(); it != stocks_.end();) {
    it = it->second.pages == 0 && &it->second != last_stock_ ? stocks_.erase(it) : std::next(it);
  }
}

bool SmallBlocks::commit_granule(Region& region, Page& page) noexcept {
  if (page.committed) return true;
  Page* const first = &region.pages[static_cast<std::size_t>(&page - region.pages.data()) / granule_ * granule_];
  if (!source_.commit(first->address, granule_ * kPage)) return false;
  for (std::size_t i = 0; i < granule_; ++i) first[i].committed = true;
  return true;
}

SmallBlocks::Page* SmallBlocks::fresh_page(std::size_t size_class, Stream stream) {
  Page* page = spare_page(stream);
  if (page == nullptr && mostly_empty()) {  // of streams that may no longer exist
    trim();
    page = spare_page(stream);
  }
  if (page == nullptr) {
    Region* region = add_region();
    if (region == nullptr) return nullptr;
    page = &region->pages[0];
  }
  Region& region = *region_of(page->address);
  if (!commit_granule(region, *page)) return nullptr;
  if (page->stream != stream && page->was_used && !source_.order(page->stream, stream)) return nullptr;
  ++region.in_use;
  page->was_used = true;
  page->size_class = static_cast<std::uint8_t>(size_class);
  page->stream = stream;
  page->used = 0;
  page->blocks = static_cast<std::uint16_t>(kPage / size_of(size_class));
  for (unsigned word = 0; word < page->free.size(); ++word) {
    const int left = static_cast<int>(page->blocks) - static_cast<int>(word) * 64;
    page->free[word] = left >= 64 ? ~std::uint64_t{0} : left <= 0 ? 0 : (std::uint64_t{1} << left) - 1;
  }
  return page;
}

Address SmallBlocks::allocate(std::size_t bytes, Stream stream) {
  const std::size_t size_class = class_of(bytes);
  if (last_stock_ == nullptr || last_stream_ != stream) {
    if (stocks_.size() > most_streams_ && stocks_.count(stream) == 0) {
      forget_streams();
      most_streams_ = 2 * stocks_.size() + kFewStreams;
    }
    last_stock_ = &stocks_[stream];
    last_stream_ = stream;
  }
  Page*& room = last_stock_->room[size_class];
  if (room == nullptr) {
    room = fresh_page(size_class, stream);
    if (room == nullptr) return 0;
    room->listed = true;
    room->next = nullptr;
  }
  Page& page = *room;
  unsigned word = 0;
  while (page.free[word] == 0) ++word;
  const unsigned block = word * 64 + static_cast<unsigned>(__builtin_ctzll(page.free[word]));
  page.free[word] &= page.free[word] - 1;
  ++live_;
  page.requested[block] = static_cast<std::uint16_t>(bytes);
  if (++page.used == page.blocks) {  // full: leave the list
    page.listed = false;
    room = page.next;
  }
  return page.address + block * size_of(size_class);
}

SmallBlocks::Place SmallBlocks::find(Address address) const noexcept {
  Place place;
  Region* const region = region_of(address);
  if (region == nullptr) return place;
  place.in_a_region = true;
  Page& page = region->pages[(address - region->base) / kPage];
  const auto within = static_cast<std::uint32_t>(address - page.address);
  // A division: the rounding of the inverse adds less than 2^14, and the next block is 2^32 / size further.
  const std::size_t block = (std::uint64_t{within} * inverse_[page.size_class]) >> 32;
  const bool begins = block < page.blocks && block * size_of(page.size_class) == within;
  if (!begins || (page.free[block / 64] >> (block % 64) & 1) != 0) return place;
  place.page_ = &page;
  place.block_ = block;
  return place;
}

void SmallBlocks::free(const Place& place) noexcept {
  Page& page = *place.page_;
  page.free[place.block_ / 64] |= std::uint64_t{1} << (place.block_ % 64);
  --page.used;
  --live_;
  if (page.listed) return;
  Page*& room = stocks_.find(page.stream)->second.room[page.size_class];
  page.next = room;
  page.listed = true;
  room = &page;
}

void SmallBlocks::trim() noexcept {
  if (source_.held()) return;
  for (auto& [stream, stock] : stocks_) {
    for (Page*& room : stock.room) {
      for (Page** link = &room; *link != nullptr;) {
        Page* page = *link;
        if (page->used != 0) {
          link = &page->next;
          continue;
        }
        *link = page->next;
        page->listed = false;
        page->blocks = 0;
        --region_of(page->address)->in_use;
      }
    }
  }
  forget_users();
  for (std::size_t i = regions_.size(); i-- > 0;) {
    if (!return_granules(*regions_[i]) || regions_[i]->in_use != 0) continue;
    if (!source_.release(regions_[i]->base, kRegion, 0)) continue;
    regions_by_base_.erase(regions_[i]->base / kRegion);
    regions_.erase(regions_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  first_spare_ = 0;
  forget_streams();
}

// Clear the former users of spare pages. A spare page goes to the next requesting stream, and by then the
// former user may no longer exist and could not be waited for.
void SmallBlocks::forget_users() noexcept {
  const auto spare = [](const Page& page) { return page.blocks == 0 && page.was_used; };
  const auto any = [&](const auto& region) { return std::any_of(region->pages.begin(), region->pages.end(), spare); };
  if (std::none_of(regions_.begin(), regions_.end(), any) || !source_.wait_for_users()) return;
  for (const auto& region : regions_) {
    for (Page& page : region->pages) page.was_used = page.was_used && !spare(page);
  }
}

// Release the region's unused pages. False: the device could not be waited for.
bool SmallBlocks::return_granules(Region& region) noexcept {
  if (source_.traits().page == 0) return true;
  for (Page* first = region.pages.begin(); first != region.pages.end(); first += granule_) {
    Page* const last = first + granule_;
    if (!first->committed || std::any_of(first, last, [](const Page& page) { return page.blocks != 0; })) continue;
    if (!source_.decommit(first->address, granule_ * kPage)) return false;
    for (Page* page = first; page != last; ++page) page->committed = false;
  }
  return true;
}

}  // namespace mempool
