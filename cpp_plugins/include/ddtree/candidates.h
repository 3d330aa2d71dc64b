// The candidates a drafter states, as rows: the children of a node, most probable first.
//
// L draft positions, K or C candidates per row, R rows, r the rank of a bilinear form. Row 0 is the root's. A source
// answers two questions: what are the log-probabilities and tokens of a row, and which row has the children of a
// candidate.
#pragma once

#include <cstdint>
#include <vector>

namespace ddtree {

enum class RowStatus { ok, not_a_number, not_sorted, bad_link };

constexpr int32_t kNoRow = -1;  // of a candidate without children

// Children of every node at depth d are row d: log_probs and token_ids [L, K].
struct Marginals {
    const float* log_probs;
    const int32_t* token_ids;
    int64_t rows;
    int64_t candidates;
};

// Children of a candidate are the row that next_rows names, after its own, or none (kNoRow). All [R, K].
struct LinkedRows {
    const float* log_probs;
    const int32_t* token_ids;
    const int32_t* next_rows;
    int64_t rows;
    int64_t candidates;
};

// The conditional of candidate b at position t after candidate a at t - 1 is log_softmax over b of
// unary[t, b] + <left[t, a], right[t, b]>. At t = 0 the predecessor is the anchor, left[0, 0].
// unary and token_ids [L, C], left and right [L, C, r].
struct Bilinear {
    const float* unary;
    const int32_t* token_ids;
    const float* left;
    const float* right;
    int64_t positions;
    int64_t candidates;
    int64_t rank;

    // Row 0 is the root's; row 1 + t * C + a has the children of candidate a of position t.
    int64_t rows() const { return positions > 0 ? 1 + (positions - 1) * candidates : 0; }
    int64_t position(int64_t row) const { return row == 0 ? 0 : 1 + (row - 1) / candidates; }
    int32_t row_below(int64_t position, int32_t candidate) const {
        return position + 1 < positions ? static_cast<int32_t>(1 + position * candidates + candidate) : kNoRow;
    }
};

// Every row falls and holds no NaN and no +inf: log_probs [rows, candidates].
RowStatus check_rows(const float* log_probs, int64_t rows, int64_t candidates);

// check_rows, and every link is kNoRow or a later row.
RowStatus check_links(const LinkedRows& source);

// Conditional rows, each computed when it is first asked for. Kept between builds so that a warm one allocates nothing.
class BilinearRows {
public:
    // Forgets all rows and takes those of another draft.
    void reset(const Bilinear& source);

    // Computes a row unless it is. False where a score is NaN or +inf. Of equal scores the lower candidate is first.
    bool compute(int64_t row);

    // Of computed rows, [C] each; `order` is the candidate of each rank.
    const float* log_probs(int64_t row) const { return log_probs_.data() + row * source_.candidates; }
    const int32_t* order(int64_t row) const { return order_.data() + row * source_.candidates; }

    const Bilinear& source() const { return source_; }

private:
    Bilinear source_{};
    std::vector<char> computed_;
    std::vector<float> log_probs_;
    std::vector<int32_t> order_;
    std::vector<float> scores_;
};

}  // namespace ddtree
