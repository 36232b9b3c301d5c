// Damaged session files: an error or the right state, and the pool keeps its counts.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "replayssm/core/error.h"
#include "replayssm/state/session_file.h"
#include "tests/bad_input.h"
#include "tests/mini_model.h"
#include "tests/mutation.h"
#include "tests/walks.h"

namespace replayssm {
namespace {

using test::mini_layout;
using test::MiniModel;
using test::Mutator;
using test::pool_bits;
using test::TemporaryDirectory;

class SessionMutation : public testing::Test {
 protected:
  SessionMutation()
      : model_(mini_layout(6, 4)),
        pool_(model_.layout(), pool_size(model_.layout(), 1, 512)),
        path_(directory_.path("session")) {
    const Handle handle = pool_.allocate(64);
    model_.run(pool_, StepKind::kPrefill, {handle}, {{1, 2, 3}});
    pool_.commit();
    model_.run(pool_, StepKind::kReplay, {handle}, {{4, 5, 6}});
    pool_.commit(std::vector<int>{2});
    save_session(pool_, handle, path_);
    pool_.free(handle);
    // The pool as it is after a right load: what the reload of a mutation that is accepted must give.
    cursor_ = {3, 2};
    pool_.free(load_session(pool_, path_, 64));
    bits_ = pool_bits(pool_);
    std::ostringstream text;
    text << std::ifstream(path_, std::ios::binary).rdbuf();
    contents_ = text.str();
    std::memcpy(&header_bytes_, contents_.data(), sizeof header_bytes_);
  }

  // Edits of the whole file, or of the header as JSON with its length put right.
  std::string mutate(Mutator& mutator, const std::string& input) const {
    if (mutator.below(3) == 0) return mutator.bytes(input);
    const std::string header = mutator.json(input.substr(sizeof header_bytes_, header_bytes_));
    const uint64_t length = header.size();
    std::string file(sizeof length, '\0');
    std::memcpy(file.data(), &length, sizeof length);
    return file + header + input.substr(sizeof header_bytes_ + header_bytes_);
  }

  // A new file each time: cutting an old one short first waits for the disk on some file systems.
  std::string write(const std::string& name, const std::string& contents) const {
    std::filesystem::remove(directory_.path(name));
    return directory_.write(name, contents);
  }

  TemporaryDirectory directory_;
  MiniModel model_;
  StatePool pool_;
  std::string path_, contents_;
  Cursor cursor_;
  std::vector<uint32_t> bits_;
  uint64_t header_bytes_ = 0;
};

TEST_F(SessionMutation, AnyDamageIsAnErrorOrMeansTheSame) {
  const int mutations = test::walk_length(20'000);
  const auto counts = test::survive_mutations(
      contents_, mutations, 1, [this](Mutator& mutator, const std::string& input) { return mutate(mutator, input); },
      [this](const std::string& mutated) {
        const std::string path = write("mutated", mutated);
        const PoolCounts before = pool_.counts();
        try {
          const Handle handle = load_session(pool_, path, 64);
          EXPECT_EQ(pool_.cursor(handle), cursor_);
          EXPECT_EQ(pool_bits(pool_), bits_);
          pool_.free(handle);
        } catch (const Error&) {
          EXPECT_EQ(pool_.counts(), before);
          throw;
        }
      });
  EXPECT_GT(counts.refused, mutations / 2);
  EXPECT_EQ(pool_bits(pool_), bits_);
  pool_.ledger().audit();
}

// Whoever can edit a file can also sign it: behind a right checksum every number is still checked.
TEST_F(SessionMutation, ASignedEditIsAnErrorOrAStateOfThisPool) {
  int signed_edits = 0;
  const int mutations = test::walk_length(5'000);
  test::survive_mutations(
      contents_, mutations, 100'000,
      [this](Mutator& mutator, const std::string& input) { return mutate(mutator, input); },
      [&](const std::string& mutated) {
        std::string line;
        try {
          pool_.free(load_session(pool_, write("mutated", mutated), 64));
          return;
        } catch (const Error& error) {
          line = error.what();
        }
        // "... corrupt, its checksum is A, its contents give B"
        const std::string is = "its checksum is ", give = ", its contents give ";
        const size_t first = line.find(is), second = line.find(give);
        if (first == std::string::npos || second == std::string::npos) return;
        const std::string checksum = line.substr(first + is.size(), second - first - is.size());
        const size_t place = mutated.find(checksum);
        if (place == std::string::npos || checksum.size() != 16) return;
        const std::string path =
            write("signed", std::string(mutated).replace(place, 16, line.substr(second + give.size())));
        const PoolCounts before = pool_.counts();
        try {
          const Handle handle = load_session(pool_, path, 64);
          const Cursor cursor = pool_.cursor(handle);
          EXPECT_LE(cursor.tokens(), 64);
          EXPECT_LE(cursor.history, 6);
          model_.run(pool_, StepKind::kReplay, {handle}, {{1, 2}});
          pool_.commit();
          pool_.free(handle);
          ++signed_edits;
        } catch (const Error& error) {
          signed_edits += std::string(error.what()).find("corrupt") == std::string::npos;
          EXPECT_EQ(pool_.counts(), before);
          throw;
        }
      });
  EXPECT_GT(signed_edits, mutations / 25);
  pool_.ledger().audit();
}

}  // namespace
}  // namespace replayssm
